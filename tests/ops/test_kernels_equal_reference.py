"""Every operator, in both compiled variants, gives the bits of the executable specification."""

import pytest
import torch

from inputs import normal, revealing
from megatron_ext import ops
from megatron_ext.ops import ascendc
from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reference import elementary

LINEAR_SHAPES = [(1, 256, 16), (17, 256, 35), (5, 768, 24), (3, 128, 1)]


def assert_both_same(results, what):
    ours, expected = results
    if isinstance(ours, torch.Tensor):
        ours, expected = (ours,), (expected,)
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert_same_bits(a, b, f"{what}[{i}]")


@pytest.mark.parametrize(("m", "k", "n"), LINEAR_SHAPES)
def test_linear(both, dtype, m, k, n):
    x, w = revealing(m, k, dtype=dtype), revealing(n, k, dtype=dtype, seed=1)
    assert_both_same(both(lambda: ops.linear_fp32(x, w)), "linear_fp32")
    assert_both_same(both(lambda: ops.linear(x, w)), "linear")


@pytest.mark.parametrize("scale", [1e-21, 1e-17, 1.0, 1e21])
def test_products_that_fp32_cannot_hold(both, scale):
    """Below about 2^-134 a product loses bits, above 2^128 it is infinite: there a fused multiply-add would not stand for two roundings."""
    x, w = normal(17, 256, dtype=torch.float32), normal(35, 256, dtype=torch.float32, seed=1)
    x, w = (x * scale).bfloat16(), (w * scale).bfloat16()
    w[3] = 0.0
    assert_both_same(both(lambda: ops.linear_fp32(x, w)), "linear_fp32")

    def run():
        grad = torch.zeros(35, 256)
        ops.wgrad_(grad, w[:, :35].contiguous(), w, None)
        return grad

    assert_both_same(both(run), "wgrad")


def test_threads_do_not_show(variant, order):
    x, w, dy = revealing(70, 1024, dtype=torch.bfloat16), revealing(272, 1024, dtype=torch.bfloat16, seed=1), revealing(70, 272, dtype=torch.bfloat16, seed=2)
    ops.configure(order, "ascendc")
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            grad = torch.zeros(272, 1024)
            ops.wgrad_(grad, dy, x, torch.tensor([0, 33, 70], dtype=torch.int32))
            results.append((ops.linear_fp32(x, w), ops.linear_fp32(x, w[:16]), ops.dgrad_fp32(dy, w), grad))
    finally:
        torch.set_num_threads(before)
    for threads, found in enumerate(results[1:], start=2):
        for name, a, b in zip(("linear", "one panel", "dgrad", "wgrad"), found, results[0], strict=True):
            assert_same_bits(a, b, f"{name} with {threads} threads")


@pytest.mark.parametrize("gated", [False, True])
def test_dgrad(both, dtype, gated):
    dy, w = revealing(17, 256, dtype=dtype), revealing(256, 37, dtype=dtype, seed=1)
    assert_both_same(both(lambda: ops.dgrad_fp32(dy, w, segments=4, gated=gated)), "dgrad")


@pytest.mark.parametrize("experts", [5, 16, 60])
def test_router_dgrad(both, dtype, experts):
    dlogits, w = revealing(9, experts, dtype=dtype), revealing(experts, 128, dtype=dtype, seed=1)
    assert_both_same(both(lambda: ops.router_dgrad(dlogits, w)), "router_dgrad")


def test_wgrad_continues_an_accumulator(both, dtype):
    dy, x, start = revealing(41, 13, dtype=dtype), revealing(41, 37, dtype=dtype, seed=1), normal(13, 37, dtype=torch.float32)
    cu = torch.tensor([0, 17, 18, 41], dtype=torch.int32)

    def run():
        grad = start.clone()
        ops.wgrad_(grad, dy, x, cu)
        return grad

    assert_both_same(both(run), "wgrad")


def test_norm(both, dtype):
    x, w, dy = revealing(43, 96, dtype=dtype), normal(96, dtype=dtype), normal(43, 96, dtype=dtype, seed=2)

    def run():
        dw = torch.ones(96)
        return ops.rms_norm(x, w, 1e-6), ops.rms_norm_backward_(dw, dy, x, w, 1e-6), dw, *ops.add_rms_norm(x, dy, w, 1e-6)

    assert_both_same(both(run), "norm")


def test_swiglu(both, dtype):
    gate_up, da = normal(7, 96, dtype=dtype, scale=30), normal(7, 48, dtype=dtype, seed=1)

    def run():
        leaf = gate_up.clone().requires_grad_()
        out = ops.swiglu(leaf)
        out.backward(da)
        return out.detach(), leaf.grad

    assert_both_same(both(run), "swiglu")


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_attention_and_its_gradient(both, dtype, head_dim):
    cu = torch.tensor([0, 1, 130, 290], dtype=torch.int32)
    q, k, v, do = (normal(290, heads, head_dim, dtype=dtype, seed=i) for i, heads in enumerate((4, 2, 2, 4)))

    def run():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = ops.attention_varlen(*leaves, cu, head_dim**-0.5)
        out.backward(do)
        return out.detach(), *(leaf.grad for leaf in leaves)

    assert_both_same(both(run), "attention")


@pytest.mark.parametrize("settings", [
    {"top_k": 4}, {"top_k": 4, "renormalize": False, "scale": 2.5}, {"top_k": 1, "score_function": "sigmoid"},
    {"top_k": 3, "score_function": "sigmoid", "correction_bias": torch.linspace(-1, 1, 16), "num_groups": 4, "topk_groups": 2},
])  # fmt: skip
def test_route(both, settings):
    logits = normal(33, 16, dtype=torch.float32, scale=3)
    logits[:, 3] = logits[:, 11]  # ties

    def run():
        leaf = logits.clone().requires_grad_()
        weights, ids = ops.route(leaf, **settings)
        weights.backward(torch.ones_like(weights) * torch.arange(1.0, 1 + weights.shape[1]))
        return weights.detach(), ids, leaf.grad

    assert_both_same(both(run), "route")


@pytest.mark.parametrize("num_experts", [12, 16, 60])
def test_combine(both, dtype, num_experts):
    pairs = torch.randperm(9 * num_experts, generator=torch.Generator().manual_seed(0))[:40]
    tokens, experts = pairs // num_experts, pairs % num_experts
    y, weights, dout = revealing(40, 33, dtype=dtype), normal(40, dtype=torch.float32), normal(10, 33, dtype=torch.float32, seed=3)

    def run():
        y_leaf, w_leaf = y.clone().requires_grad_(), weights.clone().requires_grad_()
        out = ops.combine(y_leaf, w_leaf, tokens, experts, 10, num_experts)
        out.backward(dout)
        return out.detach(), y_leaf.grad, w_leaf.grad

    assert_both_same(both(run), "combine")


def test_token_copies(both, dtype):
    """permute, unpermute, and the rows form of combine with its gradients."""
    tokens, experts = torch.tensor([0, 0, 2, 2, 4]), torch.tensor([3, 9, 0, 11, 5])
    x, y, weights, index = revealing(5, 33, dtype=dtype), revealing(5, 33, dtype=dtype, seed=1), normal(5, dtype=torch.float32), torch.tensor([2, 0, 4, 1, 3])

    def run():
        y_leaf, w_leaf = y.clone().requires_grad_(), weights.clone().requires_grad_()
        out = ops.combine_rows(y_leaf, w_leaf, tokens, experts, 6, 12)
        out.backward(torch.ones_like(out))
        return ops.permute(x, tokens), ops.unpermute(x, index), out.detach(), y_leaf.grad, w_leaf.grad

    assert_both_same(both(run), "token copies")


def test_grouped_linear(both, dtype):
    counts, boundaries = torch.tensor([0, 5, 1, 0, 20]), torch.tensor([0, 3, 5, 6, 13, 26])
    x, dy, w = revealing(26, 128, dtype=dtype), revealing(26, 64, dtype=dtype, seed=1), revealing(5, 64, 128, dtype=dtype, seed=2)

    def run():
        grads = list(torch.ones(5, 64, 128))
        ops.grouped_wgrad_(grads, dy, x, counts, boundaries)
        dx = ops.grouped_dgrad(dy, w, counts, gated=True), ops.grouped_dgrad_fp32(dy, w, counts, 4)
        return ops.grouped_linear(x, w, counts), *dx, torch.stack(grads)

    assert_both_same(both(run), "grouped")


def test_vocabulary(both):
    logits, grad = normal(5, 1024, dtype=torch.float32, scale=10), normal(5, dtype=torch.float32, seed=1)
    targets = torch.tensor([0, 999, -1, 512, 3])

    def run():
        row_max = ops.vocab_max(logits, 1000)
        exp_sum = ops.vocab_exp_sum(logits, row_max, 1000, 8)
        dlogits = ops.vocab_dlogits(logits, row_max, exp_sum, targets, grad, 1000, torch.bfloat16)
        return row_max, exp_sum, dlogits, ops.log_softmax(logits[:, :1000].contiguous())

    assert_both_same(both(run), "vocabulary")


def test_embedding_gradient(both, dtype):
    ids, dy = torch.randint(-1, 5, (40,), generator=torch.Generator().manual_seed(0)), revealing(40, 33, dtype=dtype)

    def run():
        grad = torch.ones(5, 33)
        ops.embedding_wgrad_(grad, ids, dy)
        return grad

    assert_both_same(both(run), "embedding")


def test_sampling(both):
    """Signed zeros and equal logits among them; a row with NaN has no token."""
    logits = (normal(6, 1000, dtype=torch.float32, scale=3) * 2).round() / 2
    logits[:, ::7], logits[3, 5] = -0.0, float("nan")
    seeds, positions = torch.arange(6) * 0x123456789ABCDEF - 5, torch.arange(6) << 31
    filters = torch.tensor([0, 1, 50, 7, 0, 1000]), torch.tensor([1.0, 0.9, 0.5, 0.9, 1e-6, 0.95]), torch.tensor([0.0, 0.1, 0.0, 0.2, 1.0, 0.01])

    def run():
        tokens, last = ops.sample(logits, seeds, positions, 0.7, *filters)
        assert tokens[3] == last[3] == -1
        beams = ops.beam_step(logits[:, :3].contiguous(), logits.view(6, 1, 1000).expand(6, 3, 1000), 8)
        return tokens, last, ops.support_mask(logits, last), *ops.sample(logits, seeds, positions), *beams

    assert_both_same(both(run), "sampling")


def test_returns(both):
    """What the mask leaves out is NaN; -0 among what it keeps."""
    rewards, values = revealing(2, 9, 150, dtype=torch.float32)
    mask = normal(9, 150, dtype=torch.float32, seed=1) < 0.8
    rewards[:, ::5] = -0.0
    rewards, values, bootstrap = torch.where(mask, rewards, float("nan")), torch.where(mask, values, float("nan")), normal(9, dtype=torch.float32)

    def run():
        scans = *ops.gae(rewards, values, mask, 0.99, 0.95, bootstrap), ops.discounted_returns(rewards, mask, 0.9)
        return *scans, ops.masked_mean(values, mask), ops.masked_whiten(values, mask)

    assert_both_same(both(run), "returns")


@pytest.mark.parametrize("name", ["exp", "log"])
def test_elementary_over_the_whole_range(variant, name):
    """One in 4099 of all fp32 bit patterns, NaN payloads aside."""
    x = torch.arange(0, 2**32, 4099, dtype=torch.int64).to(torch.int32).view(torch.float32)
    ours, expected = (torch.nan_to_num(getattr(m, name)(x), nan=-7.0, posinf=None, neginf=None) for m in (ascendc, elementary))
    assert_same_bits(ours, expected, name)
