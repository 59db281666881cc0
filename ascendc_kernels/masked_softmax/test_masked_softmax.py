"""masked_softmax and its gradient: the bits of reference/softmax.py on every implementation; refusals; registration."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import normal, revealing

from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reference import softmax

op = torch.ops.megatron_ext
SCALE = 0.088388
SHAPES = [(1, 1, 1, 1), (2, 3, 5, 64), (1, 2, 17, 130), (3, 40), (2, 2, 1000), (1, 1, 2, 5000), (1, 1, 1, 8192)]


def exercise() -> None:
    """Every kernel of the folder, over several tiles of every loop."""
    for dtype in (torch.float32, torch.bfloat16):
        for x in (normal(3, 9000, dtype=dtype), normal(3, 70, dtype=dtype)):
            p = op.masked_softmax(x, torch.rand(x.shape) < 0.3, SCALE)
            op.masked_softmax(x, None, SCALE)
            op.masked_softmax(x, None, SCALE, True)
            op.masked_softmax_backward(x, p, SCALE)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request):
    return request.param


def scores(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Wide enough that exponents become subnormal and zero."""
    wide = normal(*shape, dtype=torch.float32, seed=seed + 1)
    x = normal(*shape, dtype=torch.float32, seed=seed, scale=30.0)
    return torch.where(wide > 1.3, x * 20.0, x).to(dtype)


def random_mask(*shape: int, seed: int = 0, share: float = 0.3) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share


@pytest.mark.parametrize("shape", SHAPES)
def test_forward(implementation, dtype, shape):
    x = scores(*shape, dtype=dtype)
    mask = random_mask(*shape)
    mask[..., 0, :] = True  # a row without a key
    for m in (None, mask):
        for causal in (False, True):
            for scale in (SCALE, 1.0):
                expected = softmax.masked_softmax(x, m, scale, causal)
                assert_same_bits(op.masked_softmax(x, m, scale, causal), expected, f"mask {m is not None}, causal {causal}, scale {scale}")
    assert_same_bits(op.masked_softmax(x, mask, SCALE)[..., 0, :], torch.zeros_like(x[..., 0, :]), "masked as a whole")


@pytest.mark.parametrize("shape", SHAPES)
def test_backward(implementation, dtype, shape):
    p = softmax.masked_softmax(scores(*shape, dtype=dtype), random_mask(*shape), SCALE)
    dp = revealing(*shape, dtype=dtype, seed=3)
    assert_same_bits(op.masked_softmax_backward(dp, p, SCALE), softmax.masked_softmax_backward(dp, p, SCALE))


def test_what_masked_lanes_hold_does_not_show(implementation, dtype):
    """Infinities and NaN under the mask, in the scores and in the gradient."""
    x, dp, mask = scores(4, 200, dtype=dtype), normal(4, 200, dtype=dtype, seed=2), random_mask(4, 200)
    expected = op.masked_softmax(x, mask, SCALE)
    gradient = op.masked_softmax_backward(dp, expected, SCALE)
    for value in (math.nan, math.inf, -math.inf):
        assert_same_bits(op.masked_softmax(x.masked_fill(mask, value), mask, SCALE), expected, f"{value}")
        assert_same_bits(op.masked_softmax_backward(dp.masked_fill(expected == 0, value), expected, SCALE), gradient, f"{value}")
    assert not gradient.masked_select(mask).any()


def test_rows_that_are_not_finite(implementation, dtype):
    x, mask = scores(6, 300, dtype=dtype), random_mask(6, 300)
    for row, value in enumerate([math.nan, math.inf, -math.inf]):
        x[row, ~mask[row]] = value
    x[3, 7], mask[3, 7], x[4, 299], mask[4, 299] = math.nan, False, math.inf, False
    for m in (mask, None):
        ours, expected = op.masked_softmax(x, m, 1.0), softmax.masked_softmax(x, m, 1.0)
        assert torch.equal(ours.isnan(), expected.isnan())
        assert_same_bits(ours.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_masks_are_broadcast_where_they_are(implementation):
    x = scores(3, 4, 6, 70, dtype=torch.bfloat16)
    whole = random_mask(3, 8, 12, 140)
    masks = [
        whole[:, :1, :6, :70], whole[0, 0, :6, :70], whole[:1, :4, :1, 5:75], whole[:, :4, ::2, 70:], whole[:, :1, :6, ::2], whole[:, :4, :6, :1],
        whole[0, 0, 0, :70], whole[0, 0, 0, 0], whole[:, :1, :70, :6].transpose(2, 3)[..., :1],
    ]  # fmt: skip
    for mask in masks:
        assert_same_bits(op.masked_softmax(x, mask, SCALE), softmax.masked_softmax(x, mask, SCALE), f"mask {tuple(mask.shape)}")
        assert_same_bits(op.masked_softmax(x, mask, SCALE, True), softmax.masked_softmax(x, mask, SCALE, True), f"causal, mask {tuple(mask.shape)}")


def test_causal_ends_at_the_last_key(implementation):
    """More keys than queries: those before were cached. More queries than keys: the first queries see none."""
    for queries, keys in ((5, 300), (300, 5), (1, 77), (64, 64)):
        x = scores(2, queries, keys, dtype=torch.bfloat16)
        assert_same_bits(op.masked_softmax(x, None, SCALE, True), softmax.masked_softmax(x, None, SCALE, True), f"{queries} x {keys}")


def test_strides_and_neighbours_do_not_show(implementation, dtype):
    whole = scores(5, 9, 150, dtype=dtype)
    for x in (whole[:, 1:, 3:], whole.transpose(1, 2), whole[::2, :, ::3]):
        alone = torch.stack([op.masked_softmax(row[None], None, SCALE)[0] for row in x.flatten(0, 1)]).view(x.shape)
        assert_same_bits(op.masked_softmax(x, None, SCALE), alone)
        assert_same_bits(op.masked_softmax_backward(x, alone, SCALE), softmax.masked_softmax_backward(x, alone, SCALE))


def test_padding_does_not_show(implementation, dtype):
    """Masked keys at the end, however many, leave the bits of the others as they are."""
    x = scores(7, 100, dtype=dtype)
    expected = op.masked_softmax(x, None, SCALE)
    for keys in (101, 128, 333, 4500):
        padded = torch.nn.functional.pad(x, (0, keys - 100), value=9.0)
        assert_same_bits(op.masked_softmax(padded, torch.arange(keys) >= 100, SCALE)[:, :100], expected, f"{keys} keys")


def test_threads_do_not_show(threaded, dtype):
    x, dp, mask = scores(2, 3, 50, 700, dtype=dtype), normal(2, 3, 50, 700, dtype=dtype, seed=1), random_mask(2, 1, 50, 700)

    def run():
        p = op.masked_softmax(x, mask, SCALE, True)
        return p, op.masked_softmax_backward(dp, p, SCALE)

    results = threaded(run)
    for threads, found in results.items():
        for i, (a, b) in enumerate(zip(found, results[1], strict=True)):
            assert_same_bits(a, b, f"result {i} with {threads} threads")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 900), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans(), st.floats(0.01, 3.0),
       st.integers(0, 2**31))  # fmt: skip
def test_generated(queries, keys, dtype, causal, scale, seed):
    x, mask = scores(queries, keys, dtype=dtype, seed=seed), random_mask(queries, keys, seed=seed, share=0.5)
    p = softmax.masked_softmax(x, mask, scale, causal)
    assert_same_bits(op.masked_softmax(x, mask, scale, causal), p)
    assert_same_bits(op.masked_softmax_backward(x, p, scale), softmax.masked_softmax_backward(x, p, scale))


def test_gradient(implementation, dtype):
    x, dp, mask = scores(2, 9, 80, dtype=dtype).requires_grad_(), normal(2, 9, 80, dtype=dtype, seed=1), random_mask(1, 9, 80)
    (dx,) = torch.autograd.grad(op.masked_softmax(x, mask, SCALE, True), x, dp)
    p = softmax.masked_softmax(x.detach(), mask, SCALE, True)
    assert_same_bits(dx, softmax.masked_softmax_backward(dp, p, SCALE))


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda x, m: op.masked_softmax(x.double(), m, 1.0), TypeError, "x must be float32, bfloat16 or float16, found Double"),
    (lambda x, m: op.masked_softmax(x[0, 0, 0], None, 1.0), ValueError, r"must have 2 to 4 dimensions, .* found shape \[6\]"),
    (lambda x, m: op.masked_softmax(x[None], None, 1.0), ValueError, r"found shape \[1, 2, 3, 5, 6\]"),
    (lambda x, m: op.masked_softmax(x, m.float(), 1.0), TypeError, "mask must be Bool, found Float"),
    (lambda x, m: op.masked_softmax(x, m[..., 1:], 1.0), ValueError, r"mask has shape \[2, 1, 5, 5\], which cannot be broadcast to x's \[2, 3, 5, 6\]"),
    (lambda x, m: op.masked_softmax(x[0], m, 1.0), ValueError, "cannot be broadcast"),
    (lambda x, m: op.masked_softmax_backward(x.half(), x, 1.0), TypeError, "dp must be Float, found Half"),
    (lambda x, m: op.masked_softmax_backward(x[1:], x, 1.0), ValueError, r"dp has shape \[1, 3, 5, 6\], p has shape"),
    (lambda x, m: op.masked_softmax_backward(x.clone().requires_grad_(), x, 1.0).sum().backward(), RuntimeError, "not implemented"),
])  # fmt: skip
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call(scores(2, 3, 5, 6, dtype=torch.float32), random_mask(2, 1, 5, 6))


def test_empty_tensors_give_empty_results():
    assert op.masked_softmax(torch.empty(2, 0, 5), None, 1.0).shape == (2, 0, 5)
    assert op.masked_softmax(torch.empty(2, 3, 0), None, 1.0, True).shape == (2, 3, 0)


def test_registration():
    x, mask = scores(2, 3, 5, 6, dtype=torch.float32), random_mask(2, 1, 5, 6)
    torch.library.opcheck(op.masked_softmax.default, (x.clone().requires_grad_(), mask, 0.5, True))
    torch.library.opcheck(op.masked_softmax.default, (x.bfloat16(), None, 0.5))
    torch.library.opcheck(op.masked_softmax_backward.default, (x, x, 0.5))
