"""grouped_linear, grouped_dgrad, grouped_wgrad: the bits of reference/linear.py on every implementation; refusals; registration."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import normal, revealing

from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reduction_order import MMAD_ORDERS
from megatron_ext.reference import linear as reference

op = torch.ops.megatron_ext
BF16 = torch.bfloat16
# Rows of each expert: none at either end or in between, one, whole and cut tiles; one expert with every row; no row at all.
COUNTS = {"mixed": (0, 3, 1, 0, 0, 17, 5, 0), "one_has_all": (0, 0, 37, 0), "one_expert": (7,), "no_rows": (0, 0, 0)}
LONG_COUNTS = {"tiles": (130, 0, 16, 257, 1), "many_rows": (0, 600, 0, 0, 424)}
EXPERTS = [12, 60, 128, 160, 384]
# (N, K, segments)
SHAPES = [(24, 128, 8), (35, 64, 1)]
# (N, K, segments, gated)
DGRAD_SHAPES = [(64, 37, 2, True), (60, 24, 2, True), (24, 40, 8, False)]


def exercise() -> None:
    """Every kernel of the folder, over several tiles, pieces and experts."""
    counts = torch.tensor([0, 130, 3, 0, 60])
    x, dy, w = normal(193, 128), normal(193, 144), normal(5, 144, 128, seed=1)
    grads, boundaries = [torch.zeros(144, 128) for _ in counts], torch.tensor([0, 50, 130, 133, 193])
    for order in range(len(MMAD_ORDERS)):
        op.grouped_linear(x, w, counts, 2, order)
        op.grouped_dgrad(dy, w, counts, 2, True, order)
        op.grouped_dgrad_fp32(dy, w, counts, 2, False, order)
        op.grouped_wgrad_(grads, dy, x, counts, boundaries, order)


def code(mmad_order: str) -> int:
    return MMAD_ORDERS.index(mmad_order)


def spread(rows: int, experts: int, seed: int = 0) -> tuple[int, ...]:
    """Rows of experts that a router without balance would choose: many get none."""
    popularity = torch.rand(experts, generator=torch.Generator().manual_seed(seed)) ** 8
    chosen = torch.multinomial(popularity, rows, replacement=True, generator=torch.Generator().manual_seed(seed))
    return tuple(torch.bincount(chosen, minlength=experts).tolist())


def sequence_starts(counts: tuple[int, ...]) -> list[int]:
    """The first rows of experts, and of a second sequence in each that has two rows."""
    ends = torch.tensor(counts).cumsum(0).tolist()
    return sorted({0, *ends, *(end - count // 2 for end, count in zip(ends, counts, strict=True) if count > 1)})


@functools.cache  # the same for every implementation
def forward_case(counts, n, k, segments, dtype, mmad_order):
    operands = revealing(sum(counts), k, dtype=dtype), revealing(len(counts), n, k, dtype=dtype, seed=1), torch.tensor(counts)
    return operands, reference.grouped_linear_fp32(*operands, segments, mmad_order).to(dtype)


@functools.cache
def dgrad_case(counts, n, k, segments, gated, dtype, mmad_order):
    operands = revealing(sum(counts), n, dtype=dtype, seed=2), revealing(len(counts), n, k, dtype=dtype, seed=3), torch.tensor(counts)
    return operands, reference.grouped_dgrad_fp32(*operands, segments, gated, mmad_order)


@functools.cache
def wgrad_case(counts, n, k, dtype, mmad_order):
    grads, rows, starts = normal(len(counts), n, k, dtype=torch.float32), sum(counts), sequence_starts(counts)
    dy, x = revealing(rows, n, dtype=dtype, seed=1), revealing(rows, k, dtype=dtype, seed=2)
    expected = reference.grouped_wgrad(list(grads), dy, x, torch.tensor(counts), starts, mmad_order)
    return (grads, dy, x, torch.tensor(counts), torch.tensor(starts)), torch.stack(expected)


def check_forward(counts, shape, dtype, mmad_order):
    n, k, segments = shape
    operands, expected = forward_case(counts, n, k, segments, dtype, mmad_order)
    assert_same_bits(op.grouped_linear(*operands, segments, code(mmad_order)), expected, "grouped_linear")


def check_dgrad(counts, shape, dtype, mmad_order):
    operands, root = dgrad_case(counts, *shape, dtype, mmad_order)
    assert_same_bits(op.grouped_dgrad_fp32(*operands, *shape[2:], code(mmad_order)), root, "grouped_dgrad_fp32")
    assert_same_bits(op.grouped_dgrad(*operands, *shape[2:], code(mmad_order)), root.to(dtype), "grouped_dgrad")


def continued(grads, dy, x, counts, boundaries, mmad_order):
    apart = [grad.clone() for grad in grads]
    op.grouped_wgrad_(apart, dy, x, counts, boundaries, code(mmad_order))
    return torch.stack(apart)


def check_wgrad(counts, n, k, dtype, mmad_order):
    operands, expected = wgrad_case(counts, n, k, dtype, mmad_order)
    assert_same_bits(continued(*operands, mmad_order), expected, "grouped_wgrad_")


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_equals_the_reference(implementation, dtype, mmad_order, counts):
    for shape in SHAPES:
        check_forward(counts, shape, dtype, mmad_order)
    for shape in DGRAD_SHAPES:
        check_dgrad(counts, shape, dtype, mmad_order)
    check_wgrad(counts, 24, 37, dtype, mmad_order)


@pytest.mark.parametrize("experts", EXPERTS)
def test_numbers_of_experts(implementation, experts):
    counts = spread(90, experts)
    check_forward(counts, (16, 32, 2), BF16, "sequential")
    check_dgrad(counts, (32, 16, 2, True), BF16, "sequential")
    check_wgrad(counts, 16, 32, BF16, "sequential")


@pytest.mark.full
@pytest.mark.parametrize("counts", [*LONG_COUNTS.values(), *(spread(4096, experts) for experts in EXPERTS)], ids=[*LONG_COUNTS, *EXPERTS])
def test_long(implementation, dtype, mmad_order, counts):
    check_forward(counts, (144, 256, 4), dtype, mmad_order)
    check_dgrad(counts, (64, 130, 4, True), dtype, mmad_order)
    check_wgrad(counts, 40, 130, dtype, mmad_order)


def test_experts_are_linear_layers(implementation, dtype, mmad_order):
    """The bits of linear, dgrad and wgrad_ on each expert's rows alone: a row sees no other row, and no expert another."""
    counts, order = (2, 0, 20, 1), code(mmad_order)
    x, dy, w = revealing(23, 64, dtype=dtype), revealing(23, 32, dtype=dtype, seed=1), revealing(4, 32, 64, dtype=dtype, seed=2)
    y, dx = op.grouped_linear(x, w, torch.tensor(counts), 4, order), op.grouped_dgrad(dy, w, torch.tensor(counts), 4, True, order)
    dw = op.grouped_wgrad(dy, x, torch.tensor(counts), order)
    for expert, rows in enumerate(reference.expert_rows(torch.tensor(counts))):
        assert_same_bits(y[rows], op.linear(x[rows], w[expert], 4, order), f"y of expert {expert}")
        assert_same_bits(dx[rows], op.dgrad(dy[rows], w[expert], 4, True, order), f"dx of expert {expert}")
        assert_same_bits(dw[expert], op.wgrad(dy[rows], x[rows], order), f"dw of expert {expert}")


def test_an_expert_without_rows_keeps_its_gradient(implementation):
    """Bit for bit: -0 is read as +0 only where rows are added."""
    grads = torch.full((3, 16, 16), -0.0)
    result = continued(grads, normal(2, 16), normal(2, 16), torch.tensor([0, 2, 0]), torch.tensor([0, 2]), "sequential")
    assert_same_bits(result[0], grads[0])
    assert_same_bits(result[2], grads[2])
    assert not torch.equal(result[1], grads[1])


def test_strides_and_offsets_do_not_show(implementation):
    counts, whole_x, whole_w = torch.tensor([3, 0, 6]), revealing(10, 140), revealing(4, 50, 140, seed=1)
    for x, w in ((whole_x[1:, 5:133], whole_w[1:, 3:27, 2:130]), (whole_x[1:, :128], whole_w[:3, ::2, :128]), (whole_x[:9, :128], whole_w[::2][:1].expand(3, 50, 140)[..., :128])):  # fmt: skip
        expected = reference.grouped_linear_fp32(x, w, counts, 2, "sequential").to(BF16)
        assert_same_bits(op.grouped_linear(x, w, counts, 2, 0), expected, f"strides {x.stride()} and {w.stride()}")
    dy, w = revealing(9, 60)[:, 5:55], whole_w[1:, :, 3:40]
    assert_same_bits(op.grouped_dgrad(dy, w, counts, 2, False, 0), reference.grouped_dgrad_fp32(dy, w, counts, 2, False, "sequential").to(BF16))
    grads, boundaries = torch.zeros(3, 50, 30), torch.tensor([0, 3, 9])
    x = whole_x[1:, 4:34]
    expected = torch.stack(reference.grouped_wgrad(list(grads), dy, x, counts, boundaries.tolist(), "sequential"))
    assert_same_bits(continued(grads, dy, x, counts, boundaries, "sequential"), expected)


def test_threads_do_not_show(threaded):
    """Ranges of threads end inside an expert, between experts, and at experts without rows."""
    for counts in ((0, 90, 0, 300, 2, 0), (0, 392, 0)):
        x, dy, w = revealing(392, 128), revealing(392, 96, seed=1), revealing(len(counts), 96, 128, seed=2)
        number, starts, grads = torch.tensor(counts), torch.tensor(sequence_starts(counts)), normal(len(counts), 96, 128, dtype=torch.float32)

        def run():
            return op.grouped_linear(x, w, number, 4, 0), op.grouped_dgrad(dy, w, number, 4, True, 1), continued(grads, dy, x, number, starts, "groups16")

        results = threaded(run)
        for threads, found in results.items():
            for i, (ours, alone) in enumerate(zip(found, results[1], strict=True)):
                assert_same_bits(ours, alone, f"result {i} with {threads} threads")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9) | st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 40), st.sampled_from(MMAD_ORDERS), st.integers(0, 2**31))
def test_generated(counts, n, mmad_order, seed):
    rows, number, order = sum(counts), torch.tensor(counts), code(mmad_order)
    x, dy, w = revealing(rows, 64, seed=seed), revealing(rows, 2 * n, seed=seed + 1), revealing(len(counts), 2 * n, 64, seed=seed + 2)
    y = reference.grouped_linear_fp32(x, w, number, 4, mmad_order).to(BF16)
    assert_same_bits(op.grouped_linear(x, w, number, 4, order), y, "grouped_linear")
    assert_same_bits(op.grouped_dgrad_fp32(dy, w, number, 1, True, order), reference.grouped_dgrad_fp32(dy, w, number, 1, True, mmad_order), "grouped_dgrad")
    check_wgrad(tuple(counts), n, 33, BF16, mmad_order)


def test_gradients_are_grouped_dgrad_and_wgrad(implementation, dtype, mmad_order):
    order, counts, dy = code(mmad_order), torch.tensor([4, 0, 5]), revealing(9, 48, dtype=dtype, seed=3)
    x, w = revealing(9, 64, dtype=dtype).requires_grad_(), revealing(3, 48, 64, dtype=dtype, seed=1).requires_grad_()
    dx, dw = torch.autograd.grad(op.grouped_linear(x, w, counts, 4, order), (x, w), dy)
    assert_same_bits(dx, reference.grouped_dgrad_fp32(dy, w.detach(), counts, 4, False, mmad_order).to(dtype), "dx")
    zeros = [torch.zeros(48, 64) for _ in counts]
    assert_same_bits(dw, torch.stack(reference.grouped_wgrad(zeros, dy, x.detach(), counts, [0, 4, 9], mmad_order)).to(dtype), "dw")


def by_expert(x, w, counts):
    return torch.cat([torch.nn.functional.linear(x[rows], w[expert]) for expert, rows in enumerate(reference.expert_rows(counts))])


def test_the_gradient_is_that_of_the_formula():
    """The formula by gradcheck in float64, and our gradient against the formula's, within the rounding of bf16."""
    counts = torch.tensor([2, 0, 3])
    x, w = normal(5, 32, dtype=torch.float64).requires_grad_(), normal(3, 16, 32, dtype=torch.float64, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: by_expert(x, w, counts), (x, w))
    leaves, dy = [leaf.detach().bfloat16().requires_grad_() for leaf in (x, w)], normal(5, 16, seed=2)
    ours = torch.autograd.grad(op.grouped_linear(*leaves, counts, 2, 0), leaves, dy)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = torch.autograd.grad(by_expert(*exact_leaves, counts), exact_leaves, dy.double())
    for a, b in zip(ours, exact, strict=True):
        assert torch.allclose(a.double(), b, rtol=2**-8, atol=2**-16)


def test_no_columns():
    x, w, counts = normal(3, 32), normal(2, 24, 32), torch.tensor([1, 2])
    assert op.grouped_linear(x, w[:, :0], counts, 2, 0).shape == (3, 0)
    assert op.grouped_dgrad(normal(3, 24), w[..., :0], counts, 8, False, 0).shape == (3, 0)


def refused(**changes):
    arguments = {"x": normal(3, 64), "w": normal(2, 24, 64), "counts": torch.tensor([1, 2]), "segments": 2, "order": 0} | changes
    return op.grouped_linear(*arguments.values())


def refused_wgrad(**changes):
    arguments = {"grads": [torch.zeros(8, 4), torch.zeros(8, 4)], "dy": normal(3, 8), "x": normal(3, 4), "counts": torch.tensor([1, 2]),
                 "boundaries": torch.tensor([0, 1, 3]), "order": 0} | changes  # fmt: skip
    return op.grouped_wgrad_(*arguments.values())


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: refused(x=torch.zeros(3, 64)), TypeError, "x must be bfloat16 or float16, found Float"),
    (lambda: refused(w=torch.zeros(2, 24, 64).half()), TypeError, "weight must be BFloat16, found Half"),
    (lambda: refused(w=normal(2, 24, 48)), ValueError, r"x has shape \[3, 64\], weight has shape \[2, 24, 48\]: expected \[R, K\] and \[E, N, K\]"),
    (lambda: refused(counts=torch.tensor([1, 1, 1])), ValueError, r"counts must be \[2\], one number of rows for each expert, found \[3\]"),
    (lambda: refused(counts=torch.tensor([1, 2]).int()), TypeError, "counts must be Long, found Int"),
    (lambda: refused(counts=torch.tensor([1, 3])), ValueError, "counts sum to 4, but there are 3 rows"),
    (lambda: refused(counts=torch.tensor([4, -1])), ValueError, "counts must not be negative, found -1"),
    (lambda: refused(segments=3), ValueError, "segments must be a power of two up to 128, found 3"),
    (lambda: refused(segments=8), ValueError, "K must be a positive multiple of 16 x segments = 128, found 64"),
    (lambda: refused(order=2), ValueError, r"mmad_order must be 0 \(sequential\) or 1 \(groups16\), found 2"),
    (lambda: refused(x=normal(3, 64).requires_grad_(), w=normal(2, 25, 64)), ValueError, "N must be a multiple of segments = 2, found 25"),
    (lambda: op.grouped_dgrad(normal(3, 24), normal(2, 24, 8), torch.tensor([1, 2]), 8, True, 0), ValueError, "multiple of 2 x segments = 16, found 24"),
    (lambda: refused_wgrad(grads=[torch.zeros(8, 4)]), ValueError, r"counts must be \[1\]"),
    (lambda: refused_wgrad(grads=[torch.zeros(8, 4), torch.zeros(4, 8).T]), ValueError, "main_grads must be contiguous"),
    (lambda: refused_wgrad(grads=[torch.zeros(8, 4), torch.zeros(4, 8)]), ValueError, r"a main_grad has shape \[4, 8\], dy and x give \[8, 4\]"),
    (lambda: refused_wgrad(x=normal(2, 4)), ValueError, r"expected \[R, N\] and \[R, K\]"),
    (lambda: refused_wgrad(boundaries=torch.tensor([0, 1, 2])), ValueError, "from 0 to the number of rows, 3"),
    (lambda: refused_wgrad(boundaries=torch.tensor([0, 2, 1, 3])), ValueError, "must ascend"),
    (lambda: refused_wgrad(boundaries=torch.tensor([0, 2, 3])), ValueError, "the rows of expert 1 begin at 1, which is not among the boundaries"),
])  # fmt: skip
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_gradients_of_the_raw_forms_are_refused():
    x, w, counts = normal(3, 64).requires_grad_(), normal(2, 64, 24), torch.tensor([1, 2])
    for y in (op.grouped_dgrad(x, w, counts, 2, False, 0), op.grouped_dgrad_fp32(x, w, counts, 2, False, 0), op.grouped_wgrad(x, x, counts, 0)):
        with pytest.raises(RuntimeError, match="not implemented"):
            y.sum().backward()


def test_registration():
    x, w, counts = normal(3, 64), normal(2, 24, 64), torch.tensor([1, 2])
    torch.library.opcheck(op.grouped_linear.default, (x.clone().requires_grad_(), w.clone().requires_grad_(), counts, 2, 0))
    torch.library.opcheck(op.grouped_dgrad.default, (x[:, :24], w, counts, 2, True, 0))
    torch.library.opcheck(op.grouped_dgrad_fp32.default, (x[:, :24], w, counts, 2, False, 0))
    torch.library.opcheck(op.grouped_wgrad.default, (x, x, counts, 0))
    torch.library.opcheck(op.grouped_wgrad_.default, ([torch.zeros(64, 64), torch.zeros(64, 64)], x, x, counts, torch.tensor([0, 1, 3]), 0))
