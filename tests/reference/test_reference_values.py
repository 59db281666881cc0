"""The specification computes the right thing: against float64 within rounding."""

import math

import numpy as np
import pytest
import torch

from inputs import normal
from megatron_ext.reference import attention, elementary, linear, logprob, moe, norm, rope, router, softmax
from megatron_ext.reference.sums import row_sum
from megatron_ext.reduction_order import MMAD_ORDERS


def relative(actual, expected):
    return ((actual.double() - expected) / expected.abs().clamp_min(1e-30)).abs().max().item()


def test_exp_and_log_are_within_two_ulp():
    x = torch.linspace(-87, 88, 100_001)
    assert relative(elementary.exp(x), torch.exp(x.double())) < 2**-23
    y = torch.logspace(-44, 38, 100_000, dtype=torch.float64).float()
    expected = torch.log(y.double())
    assert ((elementary.log(y).double() - expected).abs() / expected.abs().clamp_min(2**-10)).max() < 2**-22


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000, 100_003])
def test_sqrt_is_correctly_rounded(count):
    """At every length and place, from subnormals to the largest numbers. numpy's is the processor's own instruction."""
    x = torch.rand(count, generator=torch.Generator().manual_seed(0)) * torch.logspace(-44, 38, count)
    assert torch.equal(elementary.sqrt(x), torch.from_numpy(np.sqrt(x.numpy())))
    assert elementary.sqrt(torch.tensor([0.0, -0.0, math.inf])).tolist() == [0.0, -0.0, math.inf]


def test_exp_and_log_at_the_edges():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([0.0, -0.0, inf, -inf, nan, 200.0, -200.0])
    assert torch.equal(elementary.exp(x).nan_to_num(nan=7.0, posinf=9.0), torch.tensor([1.0, 1.0, 9.0, 0.0, 7.0, 9.0, 0.0]))
    x = torch.tensor([1.0, 0.0, inf, -1.0, nan])
    assert torch.equal(elementary.log(x).nan_to_num(nan=7.0, posinf=9.0, neginf=-9.0), torch.tensor([0.0, -9.0, 9.0, 7.0, 7.0]))


@pytest.mark.parametrize("mmad_order", MMAD_ORDERS)
def test_linear(mmad_order):
    x, w = normal(5, 256), normal(7, 256, seed=1)
    expected = x.double() @ w.double().T
    assert (linear.linear_fp32(x, w, 8, mmad_order) - expected).abs().max() < 1e-4
    assert (linear.dgrad_fp32(x, w.T.contiguous(), 4, True, mmad_order) - x.double() @ w.T.double()).abs().max() < 1e-4


def test_norm_and_its_gradient():
    x, w, dy = normal(5, 96), normal(96, seed=1), normal(5, 96, seed=2)
    leaves = [t.double().requires_grad_() for t in (x, w)]
    expected = torch.nn.functional.rms_norm(leaves[0], (96,), leaves[1], 1e-6)
    expected.backward(dy.double())
    dw = torch.zeros(96)
    dx = norm.rms_norm_backward_(dw, dy, x, w, 1e-6)
    assert (norm.rms_norm(x, w, 1e-6) - expected).abs().max() < 0.05
    assert (dx - leaves[0].grad).abs().max() < 0.05
    assert (dw - leaves[1].grad).abs().max() < 0.05


@pytest.mark.parametrize("mmad_order", MMAD_ORDERS)
def test_attention_and_its_gradient(mmad_order):
    q, k, v, do = (normal(200, 64, dtype=torch.float16, seed=i) for i in range(4))
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*(t[None, None] for t in leaves), is_causal=True)[0, 0]
    expected.backward(do.double())
    o, lse = attention.attention(q, k, v, 0, 0.125, 128, mmad_order)
    assert (o - expected).abs().max() < 5e-3
    for actual, leaf in zip(attention.attention_backward(do, q, k, v, o, lse, 0.125, 128, mmad_order), leaves, strict=True):
        assert (actual - leaf.grad).abs().max() < 1e-2


@pytest.mark.parametrize("causal, window, kv_split", [(True, 30, None), (True, 200, 64), (False, None, None), (False, None, 128), (True, None, 64)])
def test_attention_with_a_window_without_a_mask_and_in_splits(causal, window, kv_split):
    """Also where a row sees nothing of a tile, and where it is not the first of its sequence."""
    q, k, v, do = (normal(200, 64, dtype=torch.float16, seed=i) for i in range(4))
    distance = torch.arange(200)[:, None] - torch.arange(200)[None, :]
    visible = ((distance >= 0) if causal else torch.ones(200, 200, dtype=torch.bool)) & (distance < (window or 1000))
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*(t[None, None] for t in leaves), attn_mask=visible)[0, 0]
    expected.backward(do.double())
    o, lse = attention.attention(q, k, v, 0, 0.125, 64, "sequential", causal, window, kv_split)
    assert (o - expected).abs().max() < 5e-3
    exact_lse = (q.double() @ k.double().T * 0.125).masked_fill(~visible, -math.inf).logsumexp(1)
    assert (lse - exact_lse).abs().max() < 1e-5
    tail, _ = attention.attention(q[150:], k, v, 150, 0.125, 64, "sequential", causal, window, kv_split)
    assert torch.equal(tail, o[150:])
    for actual, leaf in zip(attention.attention_backward(do, q, k, v, o, lse, 0.125, 64, "sequential", causal, window), leaves, strict=True):
        assert (actual - leaf.grad).abs().max() < 1e-2


def test_rope_matches_float64_tables():
    positions = torch.tensor([0, 1, 77, 40_000])
    cos, sin = rope.rope_tables(positions, 64, 1e6, torch.float32)
    angles = (positions.float()[:, None] * rope.inverse_frequencies(64, 1e6)).double()
    assert (cos - torch.cos(angles)).abs().max() < 1e-7
    assert (sin - torch.sin(angles)).abs().max() < 1e-7


def test_router_weights_and_gradient():
    logits = normal(6, 16, dtype=torch.float32)
    weights, ids = router.route(logits, 4, "softmax", True, 1.0, None, None, None)
    leaf = logits.double().requires_grad_()
    top = torch.topk(torch.softmax(leaf, 1), 4)
    expected = top.values / top.values.sum(1, keepdim=True)
    (expected * torch.arange(4)).sum().backward()
    assert torch.equal(ids, top.indices)
    assert (weights - expected).abs().max() < 1e-6
    gradient = router.route_backward(torch.arange(4.0).expand(6, 4), logits, ids, "softmax", True, 1.0)
    assert (gradient - leaf.grad).abs().max() < 1e-5


def test_ties_go_to_the_lower_expert():
    logits = torch.zeros(1, 16)
    assert router.route(logits, 4, "softmax", True, 1.0, None, None, None)[1].tolist() == [[0, 1, 2, 3]]


def test_combine_sums_weighted_rows():
    y, weights = normal(6, 8), torch.arange(1.0, 7.0)
    tokens, experts = torch.tensor([0, 0, 0, 2, 2, 2]), torch.tensor([5, 0, 3, 1, 2, 7])
    out = moe.combine(y, weights, tokens, experts, 3, 8, 8, (0, 8))
    expected = torch.zeros(3, 8, dtype=torch.float64).index_add_(0, tokens, weights[:, None].double() * y.double())
    assert (out - expected).abs().max() < 1e-5


def test_logprob():
    logits = normal(4, 1000, dtype=torch.float32, scale=5)
    padded = torch.nn.functional.pad(logits, (0, 24), value=math.inf)  # padding never enters
    row_max = logprob.vocab_max(padded, 1000)
    exp_sum = logprob.vocab_exp_sum(padded, row_max, 1000, 8)
    assert (logprob.logprob_from_parts(logits[:, 7], row_max, exp_sum) - torch.log_softmax(logits.double(), 1)[:, 7]).abs().max() < 1e-5


def test_logprob_of_a_whole_vocabulary_at_a_temperature():
    """The values and the gradient by the logits, against float64; the order of its divisions costs no accuracy."""
    logits, ids, grad = normal(4, 1000, dtype=torch.float32, scale=5), torch.tensor([0, 999, 3, 70]), normal(4, dtype=torch.float32, seed=1)
    for temperature in (torch.tensor([0.7]), torch.tensor([0.5, 1.0, 1.3, 20.0])):
        leaf = logits.double().requires_grad_()
        exact = torch.log_softmax(leaf / temperature.double().view(-1, 1), 1)
        chosen = exact.gather(1, ids[:, None])[:, 0]
        assert (logprob.token_logprob(logits, ids, temperature, 8) - chosen).abs().max() < 1e-5
        assert (logprob.log_softmax(logits, temperature, 8) - exact).abs().max() < 1e-5
        (dlogits,) = torch.autograd.grad(chosen, leaf, grad.double())
        row_max, exp_sum = logprob.vocab_parts(logits, temperature, 8)
        ours = logprob.vocab_dlogits(logits, row_max, exp_sum, ids, grad, 1000, torch.float32, temperature=temperature)
        assert (ours - dlogits).abs().max() < 1e-6


def exact_masked_softmax(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * 0.3).masked_fill(mask, -math.inf).softmax(-1).masked_fill(mask, 0.0)


def test_masked_softmax_and_its_gradient():
    x, dp, mask = (normal(3, 9, 100, dtype=torch.float32, seed=i, scale=4) for i in range(3))
    mask = mask > 3.0
    mask[:, 0, 1:] = True
    assert torch.autograd.gradcheck(lambda leaf: exact_masked_softmax(leaf, mask[:, :4, :7]), x[:, :4, :7].double().requires_grad_())
    leaf = x.double().requires_grad_()
    exact = exact_masked_softmax(leaf, mask)
    (dx,) = torch.autograd.grad(exact, leaf, dp.double())
    p = softmax.masked_softmax(x, mask, 0.3)
    assert (p - exact).abs().max() < 1e-6
    assert (softmax.masked_softmax_backward(dp, p, 0.3) - dx).abs().max() < 1e-5


def test_masks_of_softmax():
    x, nothing = normal(2, 5, 8, dtype=torch.float32), torch.ones(8, dtype=torch.bool)
    assert torch.equal(softmax.masked_softmax(x, nothing, 1.0), torch.zeros(2, 5, 8))
    lower = softmax.masked_softmax(x, None, 1.0, causal=True)
    assert torch.equal(lower != 0, torch.ones(5, 8).tril(3).bool().expand(2, 5, 8))
    mask = torch.ones(5, 8).triu(4).bool()
    assert torch.equal(lower, softmax.masked_softmax(x, mask, 1.0))
    assert torch.equal(softmax.masked_softmax(x.masked_fill(mask, math.nan), mask, 1.0), lower)


def test_row_sum_adds_blocks_one_after_another():
    """1e20 + 1 loses the 1; a tree inside 64 elements and a running sum across blocks decides which ones survive."""
    x = torch.zeros(192)
    x[0], x[64], x[128], x[129] = 1e20, 1.0, -1e20, 2.0
    assert row_sum(x).item() == 0.0  # (1e20 + 1) + (-1e20 + 2) block by block
    x = torch.zeros(128)
    x[0], x[1], x[64] = 1e20, -1e20, 1.0
    assert row_sum(x).item() == 1.0
