"""linear, dgrad, wgrad: the bits of reference/linear.py on every implementation, in both orders inside a fractal; refusals; registration."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import cancelling_rows, normal, revealing

from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reduction_order import MMAD_ORDERS
from megatron_ext.reference import linear as reference

op = torch.ops.megatron_ext
BF16, F16 = torch.bfloat16, torch.float16
# (M, K, N, segments)
SHAPES = [(1, 256, 16, 8), (17, 256, 35, 8), (5, 768, 24, 8), (3, 128, 1, 8), (2, 64, 40, 1), (4, 96, 33, 2), (130, 64, 144, 2), (1, 128, 9496, 8)]
LONG_SHAPES = [(16, 4096, 16, 8), (300, 768, 257, 8), (1, 2048, 300, 128), (49, 1024, 70, 1), (200, 2048, 96, 4)]
# (M, N, K, segments, gated)
DGRAD_SHAPES = [(17, 256, 37, 4, False), (17, 256, 37, 4, True), (1, 96, 40, 4, True), (3, 60, 128, 1, False), (9, 60, 20, 4, False), (60, 24, 7, 2, True),
                (1, 5, 1, 1, False)]  # fmt: skip
# (N, K, boundaries)
WGRAD_SHAPES = [(13, 37, (0, 17, 18, 41)), (48, 64, (0, 16)), (130, 144, (0, 1, 1, 40)), (1, 1, (0, 5)), (16, 23, (0, 0, 7, 7)), (50, 16, (0, 270))]


def exercise() -> None:
    """Every kernel of the folder, over several tiles and pieces."""
    x, w = normal(130, 256), normal(144, 256, seed=1)
    for order in range(len(MMAD_ORDERS)):
        op.linear(x, w, 8, order)
        op.linear_fp32(x, w, 8, order)
        op.dgrad(normal(130, 144), w, 2, True, order)
        op.dgrad_fp32(normal(130, 144), w, 2, False, order)
        op.wgrad_(torch.zeros(144, 256), normal(130, 144), x, (0, 17, 130), order)


def code(mmad_order: str) -> int:
    return MMAD_ORDERS.index(mmad_order)


def operands(m: int, k: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return revealing(m, k, dtype=dtype), revealing(n, k, dtype=dtype, seed=1)


@functools.cache  # the same for every implementation
def expected_linear(m, k, n, segments, dtype, mmad_order):
    return reference.linear_fp32(*operands(m, k, n, dtype), segments, mmad_order)


def dgrad_operands(m, n, k, dtype):
    return revealing(m, n, dtype=dtype, seed=2), revealing(n, k, dtype=dtype, seed=3)


@functools.cache
def expected_dgrad(m, n, k, segments, gated, dtype, mmad_order):
    return reference.dgrad_fp32(*dgrad_operands(m, n, k, dtype), segments, gated, mmad_order)


def wgrad_operands(n, k, rows, dtype):
    return normal(n, k, dtype=torch.float32), revealing(rows, n, dtype=dtype, seed=1), revealing(rows, k, dtype=dtype, seed=2)


@functools.cache
def expected_wgrad(n, k, boundaries, dtype, mmad_order):
    return reference.wgrad(*wgrad_operands(n, k, boundaries[-1], dtype), list(boundaries), mmad_order)


def continued(grad, dy, x, boundaries, mmad_order):
    grad = grad.clone()
    op.wgrad_(grad, dy, x, list(boundaries), code(mmad_order))
    return grad


def check_linear(shape, dtype, mmad_order):
    m, k, n, segments = shape
    x, w = operands(m, k, n, dtype)
    root = expected_linear(*shape, dtype, mmad_order)
    assert_same_bits(op.linear_fp32(x, w, segments, code(mmad_order)), root, "linear_fp32")
    assert_same_bits(op.linear(x, w, segments, code(mmad_order)), root.to(dtype), "linear")


@pytest.mark.parametrize("shape", SHAPES)
def test_linear(implementation, dtype, mmad_order, shape):
    check_linear(shape, dtype, mmad_order)


@pytest.mark.full
@pytest.mark.parametrize("shape", LONG_SHAPES)
def test_long_linear(implementation, dtype, mmad_order, shape):
    check_linear(shape, dtype, mmad_order)


@pytest.mark.parametrize("shape", DGRAD_SHAPES)
def test_dgrad(implementation, dtype, mmad_order, shape):
    m, n, k, segments, gated = shape
    dy, w = dgrad_operands(m, n, k, dtype)
    root = expected_dgrad(*shape, dtype, mmad_order)
    assert_same_bits(op.dgrad_fp32(dy, w, segments, gated, code(mmad_order)), root, "dgrad_fp32")
    assert_same_bits(op.dgrad(dy, w, segments, gated, code(mmad_order)), root.to(dtype), "dgrad")


@pytest.mark.parametrize("shape", WGRAD_SHAPES)
def test_wgrad_continues_the_accumulator(implementation, dtype, mmad_order, shape):
    n, k, boundaries = shape
    assert_same_bits(continued(*wgrad_operands(n, k, boundaries[-1], dtype), boundaries, mmad_order), expected_wgrad(*shape, dtype, mmad_order))


def test_rows_can_be_added_in_several_calls(implementation, mmad_order):
    """At the boundaries of sequences, or of blocks of 16 rows, one call is as good as two."""
    grad, dy, x = wgrad_operands(20, 40, 50, BF16)
    whole = continued(grad, dy, x, (0, 32, 50), mmad_order)
    assert_same_bits(continued(continued(grad, dy[:32], x[:32], (0, 32), mmad_order), dy[32:], x[32:], (0, 18), mmad_order), whole)
    assert_same_bits(continued(continued(grad, dy[:16], x[:16], (0, 16), mmad_order), dy[16:], x[16:], (0, 16, 34), mmad_order), whole)


def test_the_order_is_that_of_the_segments(implementation):
    """1e20, 1, -1e20, 1 along k: 1 of each piece of four survives if it is added from left to right; the tree adds the pieces."""
    x, w = cancelling_rows(3, 128), torch.ones(16, 128, dtype=BF16)
    assert op.linear_fp32(x, w, 8, 0).tolist() == [[8.0] * 16] * 3
    assert op.linear_fp32(x, w, 1, 0).tolist() == [[1.0] * 16] * 3


def test_segments_of_a_rank_are_a_subtree(implementation, mmad_order):
    x, w = operands(5, 512, 24, BF16)
    halves = [op.linear_fp32(x[:, half], w[:, half], 4, code(mmad_order)) for half in (slice(0, 256), slice(256, 512))]
    assert_same_bits(op.linear_fp32(x, w, 8, code(mmad_order)), op.ordered_sum(torch.stack(halves)))


@pytest.mark.parametrize("scale", [1e-21, 1e-17, 1e21])
def test_products_that_fp32_cannot_hold(implementation, mmad_order, scale):
    """Below about 2^-134 a product loses bits, above 2^128 it is infinite: there a fused multiply-add would not stand for two roundings."""
    x, w = ((normal(rows, 64, dtype=torch.float32, seed=rows) * scale).bfloat16() for rows in (17, 35))
    w[3] = 0.0
    assert_same_bits(op.linear_fp32(x, w, 2, code(mmad_order)), reference.linear_fp32(x, w, 2, mmad_order), "linear")
    assert_same_bits(op.dgrad_fp32(x[:, :35], w, 1, False, code(mmad_order)), reference.dgrad_fp32(x[:, :35], w, 1, False, mmad_order), "dgrad")
    grad = torch.zeros(30, 64)
    assert_same_bits(continued(grad, w[:, :30], w, (0, 35), mmad_order), reference.wgrad(grad, w[:, :30], w, [0, 35], mmad_order), "wgrad")


def finite_floats(*shape: int) -> torch.Tensor:
    """Every exponent, subnormals and the ends of the range included; no -0."""
    bits = torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    x = torch.where(x.isfinite(), x, 1.0) + 0.0
    edges = torch.tensor([0.0, 2.0**-149, -(2.0**-149), 2.0**-133, 2.0**-126, -(2.0**-126) + 2.0**-149, 3.4028234663852886e38, -3.4028234663852886e38, 2.0**-110 * (1 + 2.0**-23)])
    x.view(-1)[: len(edges)] = edges
    return x


def test_any_finite_accumulator_comes_in_exactly(implementation, mmad_order):
    grad = finite_floats(40, 50)
    dy, x = torch.zeros(3, 40, dtype=BF16), normal(3, 50)
    assert_same_bits(continued(grad, dy, x, (0, 3), mmad_order), grad, "unchanged by zeros")
    dy = (normal(3, 40, dtype=torch.float32) * 1e-30).bfloat16()
    assert_same_bits(continued(grad, dy, x, (0, 3), mmad_order), reference.wgrad(grad, dy, x, [0, 3], mmad_order), "continued")


def test_a_negative_zero_is_read_as_positive(implementation, mmad_order):
    dy, x = torch.zeros(16, 4, dtype=BF16), -torch.ones(16, 20, dtype=BF16)
    assert_same_bits(continued(torch.full((4, 20), -0.0), dy, x, (0, 16), mmad_order), torch.zeros(4, 20))


def test_an_infinite_accumulator_stays_in_its_neighbourhood(implementation):
    grad, dy, x = wgrad_operands(20, 50, 8, BF16)
    finite = continued(grad, dy, x, (0, 8), "sequential")
    grad[3, 20] = float("inf")
    found = continued(grad, dy, x, (0, 8), "sequential")
    assert not found[3, 20].isfinite()
    found[3, 16:32] = finite[3, 16:32]
    assert_same_bits(found, finite)


def test_strides_and_offsets_do_not_show(implementation, mmad_order):
    whole, w_whole = revealing(9, 3, 200, dtype=BF16), revealing(40, 150, dtype=BF16, seed=1)
    w, order = w_whole[3:37, 5:69], code(mmad_order)
    for x in (whole[:, 1, 7:71], whole[..., 100:164], whole[:, :, :64].transpose(0, 1), whole[:5, 0, :128:2], whole[:1, 0, :64].expand(6, 64), whole[0, 0, :64]):
        y = reference.linear_fp32(x.reshape(-1, 64), w, 4, mmad_order)
        assert_same_bits(op.linear_fp32(x, w, 4, order), y.view(*x.shape[:-1], 34), f"linear, strides {x.stride()}")
    dy, x = whole[:, 0, 1:35], whole[:, 2, 60:124]
    assert_same_bits(op.dgrad_fp32(dy, w, 2, False, order), reference.dgrad_fp32(dy, w, 2, False, mmad_order), "dgrad")
    grad = torch.ones(34, 64)
    assert_same_bits(continued(grad, dy, x, (0, 4, 9), mmad_order), reference.wgrad(grad, dy, x, [0, 4, 9], mmad_order), "wgrad")


def test_rows_wider_than_a_copy_can_step(implementation):
    """Rows 65536 elements apart and more are copied one by one."""
    whole = torch.zeros(18, 70_000, dtype=BF16)
    whole[:, :64] = revealing(18, 64, dtype=BF16)
    x, w = whole[:, :64], revealing(20, 64, dtype=BF16, seed=1)
    assert_same_bits(op.linear_fp32(x, w, 2, 0), reference.linear_fp32(x, w, 2, "sequential"), "linear")
    assert_same_bits(op.linear_fp32(w, x, 2, 0), reference.linear_fp32(w, x, 2, "sequential"), "weight")
    assert_same_bits(op.dgrad_fp32(w[:, :18], x, 1, False, 0), reference.dgrad_fp32(w[:, :18], x, 1, False, "sequential"), "dgrad")
    grad = torch.ones(20, 64)
    assert_same_bits(continued(grad, w[:18, :20], x, (0, 18), "sequential"), reference.wgrad(grad, w[:18, :20], x, [0, 18], "sequential"), "wgrad")


def test_a_row_does_not_depend_on_its_neighbours(implementation, mmad_order):
    x, w = operands(35, 128, 41, BF16)
    alone = torch.cat([op.linear(row[None], w, 4, code(mmad_order)) for row in x])
    assert_same_bits(op.linear(x, w, 4, code(mmad_order)), alone)
    for rows in (*range(2, 10), 16, 17, 32, 33):
        assert_same_bits(op.linear(x[:rows], w, 4, code(mmad_order)), alone[:rows], f"{rows} rows")


def test_threads_do_not_show(threaded, mmad_order):
    x, w, dy = revealing(70, 512, dtype=BF16), revealing(272, 512, dtype=BF16, seed=1), revealing(70, 272, dtype=BF16, seed=2)
    order = code(mmad_order)

    def run():
        return (op.linear_fp32(x, w, 8, order), op.linear(x, w[:16], 8, order), op.linear(x[:2], w, 8, order), op.dgrad_fp32(dy, w, 8, True, order),
                op.dgrad(dy[:3], w, 8, False, order), continued(torch.zeros(272, 512), dy, x, (0, 33, 70), mmad_order))  # fmt: skip

    results = threaded(run)
    for threads, found in results.items():
        for i, (a, b) in enumerate(zip(found, results[1], strict=True)):
            assert_same_bits(a, b, f"result {i} with {threads} threads")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 70), st.sampled_from([1, 2, 8]), st.sampled_from([BF16, F16]), st.sampled_from(MMAD_ORDERS),
       st.integers(0, 2**31))  # fmt: skip
def test_generated(m, fractals, n, segments, dtype, mmad_order, seed):
    k = 16 * fractals * segments
    x, w = revealing(m, k, dtype=dtype, seed=seed), revealing(n, k, dtype=dtype, seed=seed + 1)
    assert_same_bits(op.linear_fp32(x, w, segments, code(mmad_order)), reference.linear_fp32(x, w, segments, mmad_order), "linear")
    assert_same_bits(op.dgrad_fp32(x, w.T.contiguous(), segments, True, code(mmad_order)),
                     reference.dgrad_fp32(x, w.T.contiguous(), segments, True, mmad_order), "dgrad")  # fmt: skip
    y, boundaries, grad = revealing(m, n, dtype=dtype, seed=seed + 2), [0, m // 3, m], normal(n, k, dtype=torch.float32)
    assert_same_bits(continued(grad, y, x, boundaries, mmad_order), reference.wgrad(grad, y, x, boundaries, mmad_order), "wgrad")


def test_gradients_are_dgrad_and_wgrad(implementation, dtype, mmad_order):
    order, dy = code(mmad_order), revealing(2, 9, 48, dtype=dtype, seed=3)
    x, w = revealing(2, 9, 64, dtype=dtype).requires_grad_(), revealing(48, 64, dtype=dtype, seed=1).requires_grad_()
    dx, dw = torch.autograd.grad(op.linear(x, w, 4, order), (x, w), dy)
    rows, dy_rows = x.detach().view(18, 64), dy.view(18, 48)
    assert_same_bits(dx, reference.dgrad_fp32(dy_rows, w.detach(), 4, False, mmad_order).to(dtype).view(x.shape), "dx")
    assert_same_bits(dw, reference.wgrad(torch.zeros(48, 64), dy_rows, rows, [0, 18], mmad_order).to(dtype), "dw")


def test_the_gradient_is_that_of_the_formula():
    """The formula by gradcheck in float64, and our gradient against the formula's, within the rounding of bf16."""
    x, w = normal(5, 32, dtype=torch.float64).requires_grad_(), normal(16, 32, dtype=torch.float64, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(torch.nn.functional.linear, (x, w))
    dy = normal(5, 16, seed=2)
    leaves = [x.detach().bfloat16().requires_grad_(), w.detach().bfloat16().requires_grad_()]
    ours = torch.autograd.grad(op.linear(*leaves, 2, 0), leaves, dy)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = torch.autograd.grad(torch.nn.functional.linear(*exact_leaves), exact_leaves, dy.double())
    for a, b in zip(ours, exact, strict=True):
        assert torch.allclose(a.double(), b, rtol=2**-8, atol=2**-16)


def test_no_rows_and_no_columns():
    w = normal(24, 32)
    assert op.linear(w[:0], w, 2, 0).shape == (0, 24)
    assert op.linear(w.new_empty(3, 0, 32), w, 2, 0).shape == (3, 0, 24)
    assert op.linear_fp32(w, w[:0], 2, 0).shape == (24, 0)
    assert op.dgrad(w.new_empty(0, 24), w, 8, False, 0).shape == (0, 32)
    grad = normal(24, 32, dtype=torch.float32)
    assert_same_bits(continued(grad, w.new_empty(0, 24), w[:0], (0, 0), "sequential"), grad)


def refused(**changes):
    x, w = normal(3, 64), normal(24, 64)
    arguments = {"x": x, "w": w, "segments": 2, "order": 0} | changes
    return op.linear(arguments["x"], arguments["w"], arguments["segments"], arguments["order"])


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: refused(x=torch.zeros(3, 64)), TypeError, "x must be bfloat16 or float16, found Float"),
    (lambda: refused(w=torch.zeros(24, 64).half()), TypeError, "weight must be BFloat16, found Half"),
    (lambda: refused(w=normal(24, 48)), ValueError, r"x has shape \[3, 64\], weight has shape \[24, 48\]"),
    (lambda: refused(segments=3), ValueError, "segments must be a power of two up to 128, found 3"),
    (lambda: refused(segments=256), ValueError, "found 256"),
    (lambda: refused(segments=8), ValueError, "K must be a positive multiple of 16 x segments = 128, found 64"),
    (lambda: refused(order=2), ValueError, r"mmad_order must be 0 \(sequential\) or 1 \(groups16\), found 2"),
    (lambda: op.dgrad(normal(3, 24), normal(24, 8), 16, False, 0), ValueError, "N must be a positive multiple of segments = 16, found 24"),
    (lambda: op.dgrad(normal(3, 24), normal(24, 8), 8, True, 0), ValueError, "N must be a positive multiple of 2 x segments = 16, found 24"),
    (lambda: op.dgrad(normal(3, 24), normal(8, 24), 2, False, 0), ValueError, "must be dimension 0 of weight"),
    (lambda: op.wgrad_(torch.zeros(4, 8).T, normal(3, 8), normal(3, 4), [0, 3], 0), ValueError, "main_grad must be contiguous"),
    (lambda: op.wgrad_(normal(8, 4), normal(3, 8), normal(3, 4), [0, 3], 0), TypeError, "main_grad must be Float"),
    (lambda: op.wgrad_(torch.zeros(4, 8), normal(3, 8), normal(3, 4), [0, 3], 0), ValueError, r"main_grad has shape \[4, 8\], dy and x give \[8, 4\]"),
    (lambda: op.wgrad_(torch.zeros(8, 4), normal(3, 8), normal(2, 4), [0, 3], 0), ValueError, "must have the same rows"),
    (lambda: op.wgrad_(torch.zeros(8, 4), normal(3, 8), normal(3, 4), [0, 2], 0), ValueError, r"from 0 to the number of rows, 3, found \[0, 2\]"),
    (lambda: op.wgrad_(torch.zeros(8, 4), normal(3, 8), normal(3, 4), [0, 2, 1, 3], 0), ValueError, "must ascend"),
    (lambda: op.linear(normal(3, 64).requires_grad_(), normal(25, 64), 2, 0), ValueError, "N must be a multiple of segments = 2, found 25"),
])  # fmt: skip
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_gradients_of_the_raw_forms_are_refused():
    x, w = normal(3, 64).requires_grad_(), normal(24, 64)
    for y in (op.linear_fp32(x, w, 2, 0), op.dgrad(x, w.T.contiguous(), 2, False, 0), op.wgrad(x, w[:3], 0)):
        with pytest.raises(RuntimeError, match="not implemented"):
            y.sum().backward()


def test_registration():
    x, w = normal(3, 64), normal(24, 64)
    torch.library.opcheck(op.linear.default, (x.clone().requires_grad_(), w.clone().requires_grad_(), 2, 0))
    torch.library.opcheck(op.linear_fp32.default, (x[None], w, 2, 1))
    torch.library.opcheck(op.dgrad.default, (x[:, :24], w, 2, True, 0))
    torch.library.opcheck(op.dgrad_fp32.default, (x[:, :24], w, 2, False, 0))
    torch.library.opcheck(op.wgrad.default, (x, x, 0))
    torch.library.opcheck(op.wgrad_.default, (torch.zeros(64, 64), x, x, [0, 1, 3], 0))
