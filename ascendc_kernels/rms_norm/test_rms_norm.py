"""rms_norm, add_rms_norm, qk_norm and the gradients: the bits of reference/norm.py on every implementation; refusals; registration."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import normal, revealing

from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reference import norm

op = torch.ops.megatron_ext
EPS = 1e-6
SHAPES = [(1, 64), (17, 96), (200, 128), (3, 2048), (5, 33), (1, 1), (2, 7680)]


def expected(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return norm.rms_norm(x.reshape(-1, x.shape[-1]), w, EPS).view(x.shape)


def exercise() -> None:
    """Every kernel of the folder, over several tiles of every loop."""
    x, w, dw = normal(200, 64), normal(64), torch.zeros(64)
    op.rms_norm(x, w, EPS)
    op.add_rms_norm(x, x, w, EPS)
    op.rms_norm_backward_(dw, x, x, w, EPS)
    op.rms_norm_backward_(torch.zeros(4096), *normal(2, 3, 4096).unbind(), normal(4096), EPS)
    op.rms_norm_backward_(torch.zeros(16), *normal(2, 1030, 16).unbind(), normal(16), EPS)


@pytest.mark.parametrize("shape", SHAPES)
def test_forward(implementation, dtype, shape):
    x, residual, w = revealing(*shape, dtype=dtype), revealing(*shape, dtype=dtype, seed=1), normal(shape[1], dtype=dtype, seed=2)
    assert_same_bits(op.rms_norm(x, w, EPS), expected(x, w), "rms_norm")
    y, total = op.add_rms_norm(x, residual, w, EPS)
    assert_same_bits(total, x + residual, "sum")
    assert_same_bits(y, expected(x + residual, w), "add_rms_norm")


@pytest.mark.parametrize("shape", SHAPES)
def test_backward_continues_the_accumulator(implementation, dtype, shape):
    x, dy, w = revealing(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1), normal(shape[1], dtype=dtype, seed=2)
    start = normal(shape[1], dtype=torch.float32, seed=3)
    ours, reference = start.clone(), start.clone()
    assert_same_bits(op.rms_norm_backward_(ours, dy, x, w, EPS), norm.rms_norm_backward_(reference, dy, x, w, EPS), "dx")
    assert_same_bits(ours, reference, "dw")


def test_heads_inside_a_packed_qkv(implementation, dtype):
    qkv = revealing(7, 2, 12, 96, dtype=dtype)
    w = normal(96, dtype=dtype)
    q, k = op.qk_norm(qkv[:, 0, :8], qkv[:, 1, 8:10], w, w, EPS)
    assert_same_bits(q, expected(qkv[:, 0, :8], w), "q")
    assert_same_bits(k, expected(qkv[:, 1, 8:10], w), "k")
    for x in (qkv[..., 2:9, :], qkv[::2], qkv.transpose(0, 1), qkv[:, :1].expand(7, 4, 12, 96), qkv[0, 0, 3]):
        assert_same_bits(op.rms_norm(x, w, EPS), expected(x, w), f"strides {x.stride()}")
    x, dy = qkv[:, 0, 3:8], normal(7, 5, 96, dtype=dtype, seed=4)
    ours, reference = torch.zeros(96), torch.zeros(96)
    dx = norm.rms_norm_backward_(reference, dy.view(-1, 96), x.reshape(-1, 96), w, EPS)
    assert_same_bits(op.rms_norm_backward_(ours, dy, x, w, EPS), dx.view(x.shape), "dx")
    assert_same_bits(ours, reference, "dw")


def test_a_row_does_not_depend_on_its_neighbours(implementation, dtype):
    x, w = revealing(70, 128, dtype=dtype), normal(128, dtype=dtype)
    alone = torch.cat([op.rms_norm(row[None], w, EPS) for row in x])
    assert_same_bits(op.rms_norm(x, w, EPS), alone)


def test_threads_do_not_show(threaded, dtype):
    x, dy, w = revealing(301, 512, dtype=dtype), normal(301, 512, dtype=dtype, seed=1), normal(512, dtype=dtype, seed=2)

    def run():
        dw = torch.ones(512)
        return op.rms_norm(x, w, EPS), *op.add_rms_norm(x, dy, w, EPS), op.rms_norm_backward_(dw, dy, x, w, EPS), dw

    results = threaded(run)
    for threads, found in results.items():
        for i, (a, b) in enumerate(zip(found, results[1], strict=True)):
            assert_same_bits(a, b, f"result {i} with {threads} threads")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 700), st.sampled_from([torch.bfloat16, torch.float16]), st.integers(0, 2**31))
def test_generated(rows, hidden, dtype, seed):
    x, w = revealing(rows, hidden, dtype=dtype, seed=seed), normal(hidden, dtype=dtype, seed=seed)
    assert_same_bits(op.rms_norm(x, w, EPS), expected(x, w))


def exact_rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * w


def test_the_gradient_is_that_of_the_formula():
    """The formula by gradcheck in float64, and our gradient against the formula's, within the rounding of bf16."""
    x, w = (normal(*shape, dtype=torch.float64, seed=i).requires_grad_() for i, shape in enumerate([(5, 48), (48,)]))
    assert torch.autograd.gradcheck(exact_rms_norm, (x, w))
    dy = normal(5, 48, dtype=torch.bfloat16, seed=2)
    leaves = [x.detach().bfloat16().requires_grad_(), w.detach().bfloat16().requires_grad_()]
    ours = torch.autograd.grad(op.rms_norm(*leaves, EPS), leaves, dy)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = torch.autograd.grad(exact_rms_norm(*exact_leaves), exact_leaves, dy.double())
    for a, b in zip(ours, exact, strict=True):
        assert torch.allclose(a.double(), b, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda x, w: op.rms_norm(x.float(), w, EPS), TypeError, "x must be bfloat16 or float16, found Float"),
    (lambda x, w: op.rms_norm(x, w.half(), EPS), TypeError, "weight must be BFloat16, found Half"),
    (lambda x, w: op.rms_norm(x, w[1:], EPS), ValueError, r"x has shape \[3, 8\], weight has shape \[7\]"),
    (lambda x, w: op.add_rms_norm(x, x[1:], w, EPS), ValueError, r"residual has shape \[2, 8\]"),
    (lambda x, w: op.rms_norm_backward_(torch.zeros(16)[::2], x, x, w, EPS), ValueError, "dw must be contiguous"),
    (lambda x, w: op.rms_norm_backward_(w, x, x, w, EPS), TypeError, "dw must be Float"),
    (lambda x, w: op.rms_norm(x.new_zeros(1, 8192), w.new_zeros(8192), EPS), ValueError, "1 to 7680, found 8192"),
])  # fmt: skip
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call(normal(3, 8), normal(8))


def test_registration():
    x, w = normal(3, 8), normal(8)
    torch.library.opcheck(op.rms_norm.default, (x.requires_grad_(), w.requires_grad_(), EPS))
    x, w = x.detach(), w.detach()
    torch.library.opcheck(op.add_rms_norm.default, (x, x, w, EPS))
    torch.library.opcheck(op.qk_norm.default, (x[None], x[None], w, w, EPS))
    torch.library.opcheck(op.rms_norm_backward.default, (x, x, w, EPS))
    torch.library.opcheck(op.rms_norm_backward_.default, (torch.zeros(8), x, x, w, EPS))
