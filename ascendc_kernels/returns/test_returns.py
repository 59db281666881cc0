"""gae, discounted_returns, masked_mean, masked_whiten: the bits of reference/returns.py on every implementation; refusals; registration."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import normal, revealing

from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reference import returns as reference

op = torch.ops.megatron_ext
# (sequences, tokens): one, whole and cut repeats of lanes, several blocks of lanes, several tiles of steps and of columns
SHAPES = [(1, 1), (3, 70), (64, 64), (65, 130), (150, 5), (2, 9000), (1, 4096)]


def exercise() -> None:
    """Every kernel of the folder, over several groups of sequences, tiles and both forms of a sum."""
    rewards, values = torch.randn(2, 150, 70)
    mask = torch.rand(150, 70) < 0.8
    op.gae(rewards, values, mask, 0.9, 0.8)
    op.discounted_returns(rewards, mask, 0.9)
    for tokens in (4096, 8200):
        op.masked_whiten(torch.randn(3, tokens), torch.rand(3, tokens) < 0.8)
    op.masked_mean(torch.randn(2100, 2), torch.ones(2100, 2, dtype=torch.bool))


def mask_of(sequences: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Holes anywhere, padding at the end, a sequence without any token, at least two tokens in all but the smallest."""
    mask = torch.rand(sequences, tokens, generator=torch.Generator().manual_seed(seed)) < 0.8
    mask[:, tokens - tokens // 5 :] = False
    mask[2:3] = False
    mask[0, :2] = True
    return mask


def with_zeros(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Zeros of both signs and subnormal numbers among those of x."""
    other = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(other < 0.1, 0.0, torch.where(other < 0.2, -0.0, torch.where(other < 0.3, x.clamp(-9, 9) * 1e-39, x)))


@functools.cache  # the same for every implementation
def scan_case(sequences: int, tokens: int, gamma: float, lam: float, bootstrapped: bool, seed: int = 0):
    rewards, values = (with_zeros(revealing(sequences, tokens, dtype=torch.float32, seed=seed + i), seed + i) for i in range(2))
    mask = mask_of(sequences, tokens, seed)
    rewards, values = (torch.where(mask, x, float("nan")) for x in (rewards, values))  # what is left out does not matter
    bootstrap = normal(sequences, dtype=torch.float32, seed=seed + 2) if bootstrapped else None
    return (rewards, values, mask, gamma, lam, bootstrap), reference.gae(rewards, values, mask, gamma, lam, bootstrap), \
        reference.discounted_returns(rewards, mask, gamma, bootstrap)  # fmt: skip


def check_scans(*key) -> None:
    arguments, (advantages, returns), discounted = scan_case(*key)
    rewards, _, mask, gamma, _, bootstrap = arguments
    found = op.gae(*arguments)
    assert_same_bits(found[0], advantages, "advantages")
    assert_same_bits(found[1], returns, "returns")
    assert_same_bits(op.discounted_returns(rewards, mask, gamma, bootstrap), discounted, "discounted returns")


@functools.cache
def masked_case(sequences: int, tokens: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp2(torch.randint(-12, 12, (sequences, tokens), generator=generator).float())  # with equal large ones, sums would be exact
    mask = mask_of(sequences, tokens, seed)
    x = torch.where(mask, with_zeros(torch.randn(sequences, tokens, generator=generator) * scales, seed), float("nan"))
    return x, mask, reference.masked_mean(x, mask), reference.masked_whiten(x, mask, 1e-6)


def check_masked(*key) -> None:
    x, mask, mean, whitened = masked_case(*key)
    assert_same_bits(op.masked_mean(x, mask), mean, "mean")
    if mask.sum() > 1:
        assert_same_bits(op.masked_whiten(x, mask, 1e-6), whitened, "whitened")


@pytest.mark.parametrize(("gamma", "lam", "bootstrapped"), [(1.0, 0.95, False), (0.99, 1.0, True), (0.0, 0.0, True)])
def test_scans(implementation, gamma, lam, bootstrapped):
    for shape in SHAPES:
        check_scans(*shape, gamma, lam, bootstrapped)


def test_masked_mean_and_whitening(implementation):
    for shape in SHAPES:
        check_masked(*shape)
    check_masked(2100, 3)


@pytest.mark.full
@pytest.mark.parametrize("shape", [(512, 1000), (1000, 300), (8, 20_000)])
def test_large_batches(implementation, shape):
    check_scans(*shape, 0.99, 0.95, True)
    check_masked(*shape)


def test_a_scan_runs_from_the_last_token_to_the_first(implementation):
    mask = torch.ones(2, 3, dtype=torch.bool)
    rewards = torch.tensor([[1.0, 1e20, -1e20], [1e20, -1e20, 1.0]])
    assert op.discounted_returns(rewards, mask, 1.0)[:, 0].tolist() == [1.0, 0.0]
    one = torch.tensor([[1e20]])
    assert op.gae(one, one, mask[:1, :1], 1.0, 1.0, torch.tensor([1.0]))[0].item() == 0.0


def test_sequences_are_added_one_after_another(implementation):
    x, mask = torch.zeros(3, 65), torch.ones(3, 65, dtype=torch.bool)
    x[0, 0], x[1, 64], x[2, 3] = 1e20, 195.0, -1e20
    assert op.masked_mean(x, mask).item() == 0.0
    assert op.masked_mean(x[[0, 2, 1]], mask).item() == 1.0


def test_signed_zeros(implementation):
    """-0 survives a scan that only ever meets -0; a sum starts from +0, and what is left out is +0."""
    mask = torch.tensor([[True, True, False]])
    minus = torch.full((1, 3), -0.0)
    assert_same_bits(op.discounted_returns(minus, mask, 1.0, minus[:, 0]), torch.tensor([[-0.0, -0.0, 0.0]]), "returns")
    assert_same_bits(op.discounted_returns(minus, mask, 1.0), torch.zeros(1, 3), "returns from +0")
    advantages, returns = op.gae(minus, torch.zeros(1, 3), mask, 1.0, 1.0, minus[:, 0])
    assert_same_bits(torch.cat([advantages, returns]), torch.zeros(2, 3), "gae")
    assert_same_bits(op.masked_mean(minus, mask), torch.tensor(0.0), "mean")
    assert_same_bits(op.masked_whiten(torch.tensor([[1.0, -1.0, -0.0]]), torch.ones(1, 3, dtype=torch.bool)), torch.tensor([[1.0, -1.0, -0.0]]), "y")


def test_neither_padding_nor_neighbours_matter(implementation):
    rewards, values = revealing(2, 70, 90, dtype=torch.float32)
    mask = mask_of(70, 90)
    padded = [torch.nn.functional.pad(x, (0, 45)) for x in (rewards, values, mask)]
    together = op.gae(rewards, values, mask, 0.9, 0.8)
    alone = [op.gae(rewards[n : n + 1], values[n : n + 1], mask[n : n + 1], 0.9, 0.8) for n in range(70)]
    for i, found in enumerate(op.gae(*padded, 0.9, 0.8)):
        assert_same_bits(found[:, :90].contiguous(), together[i], "padding")
        assert_same_bits(torch.cat([each[i] for each in alone]), together[i], "neighbours")
    assert_same_bits(op.masked_mean(padded[0], padded[2]), op.masked_mean(rewards, mask), "mean")


def test_strides_do_not_show(implementation):
    whole, mask = normal(130, 80, dtype=torch.float32), mask_of(130, 80)
    for x, kept in ((whole[:, 5:70], mask[:, 5:70]), (whole[::3], mask[::3]), (whole.T, mask.T), (whole[:1].expand(5, 80), mask[:5])):
        assert_same_bits(op.discounted_returns(x, kept, 0.9), reference.discounted_returns(x, kept, 0.9), "returns")
        assert_same_bits(op.masked_whiten(x, kept), reference.masked_whiten(x, kept), "whitened")


def test_threads_do_not_show(threaded):
    rewards, values = revealing(2, 300, 700, dtype=torch.float32)
    mask = mask_of(300, 700)
    results = threaded(lambda: (*op.gae(rewards, values, mask, 0.99, 0.95), op.masked_mean(values, mask), op.masked_whiten(rewards, mask)))
    for threads, found in results.items():
        for i, (a, b) in enumerate(zip(found, results[1], strict=True)):
            assert_same_bits(a, b, f"result {i} with {threads} threads")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 140), st.integers(1, 90), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.booleans(), st.integers(0, 2**31))
def test_generated(sequences, tokens, gamma, lam, bootstrapped, seed):
    check_scans(sequences, tokens, gamma, lam, bootstrapped, seed)
    check_masked(sequences, tokens, seed)


def test_no_sequences():
    x, mask = torch.empty(0, 7), torch.empty(0, 7, dtype=torch.bool)
    assert [found.shape for found in op.gae(x, x, mask, 0.9, 0.9)] == [(0, 7), (0, 7)]
    assert op.discounted_returns(torch.empty(3, 0), torch.empty(3, 0, dtype=torch.bool), 0.9).shape == (3, 0)


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda x, m: op.gae(x.double(), x, m, 0.9, 0.9), TypeError, "gae: rewards must be Float, found Double"),
    (lambda x, m: op.gae(x, x[:, 1:], m, 0.9, 0.9), ValueError, r"values has shape \[2, 3\], rewards has shape \[2, 4\]"),
    (lambda x, m: op.gae(x, x, m.float(), 0.9, 0.9), TypeError, "mask must be Bool, found Float"),
    (lambda x, m: op.gae(x, x, m, 1.5, 0.9), ValueError, "gamma must be 0 to 1, found 1.5"),
    (lambda x, m: op.gae(x, x, m, 0.9, float("nan")), ValueError, "lam must be 0 to 1, found nan"),
    (lambda x, m: op.gae(x, x, m, 0.9, 0.9, x[0]), ValueError, r"bootstrap must have shape \[2\], one value for each sequence, found \[4\]"),
    (lambda x, m: op.discounted_returns(x[0], m[0], 0.9), ValueError, r"rewards must have shape \[N, L\], found \[4\]"),
    (lambda x, m: op.masked_mean(x, ~m), ValueError, "at least 1 tokens are needed, the mask keeps 0"),
    (lambda x, m: op.masked_whiten(x[:1, :1], m[:1, :1]), ValueError, "at least 2 tokens are needed, the mask keeps 1"),
    (lambda x, m: op.masked_whiten(x, m, -1.0), ValueError, "eps must be at least 0, found -1"),
    (lambda x, m: op.masked_mean(x.requires_grad_(), m).backward(), RuntimeError, "not implemented"),
])  # fmt: skip
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.ones(2, 4), torch.ones(2, 4, dtype=torch.bool))


def test_registration():
    x, mask = normal(3, 8, dtype=torch.float32), mask_of(3, 8)
    torch.library.opcheck(op.gae.default, (x, x.clone(), mask, 0.9, 0.8, x[:, 0].clone()))
    torch.library.opcheck(op.gae.default, (x, x.clone(), mask, 0.9, 0.8))
    torch.library.opcheck(op.discounted_returns.default, (x, mask, 0.9))
    torch.library.opcheck(op.masked_mean.default, (x, mask))
    torch.library.opcheck(op.masked_whiten.default, (x, mask, 1e-8))
