"""Advantages and returns as specified: against float64 sums, with tokens left out, and in the order that is promised."""

import pytest
import torch

from inputs import normal
from megatron_ext.reference import returns

GAMMA, LAM = 0.97, 0.9


def exact_gae(rewards, values, gamma, lam, bootstrap):
    """The definition, term by term: A[t] = sum over l of (gamma lam)^l delta[t + l]."""
    length = len(rewards)
    following = torch.cat([values[1:], bootstrap.view(1)])
    delta = rewards + gamma * following - values
    return torch.stack([sum((gamma * lam) ** (i - t) * delta[i] for i in range(t, length)) for t in range(length)])


def sequences(seed: int = 0):
    rewards, values, bootstrap = (normal(*shape, dtype=torch.float32, seed=seed + i) for i, shape in enumerate([(3, 30), (3, 30), (3,)]))
    return rewards, values, bootstrap


def test_gae_against_its_definition_in_float64():
    rewards, values, bootstrap = sequences()
    advantages, found = returns.gae(rewards, values, torch.ones(3, 30, dtype=torch.bool), GAMMA, LAM, bootstrap)
    for n in range(3):
        expected = exact_gae(rewards[n].double(), values[n].double(), GAMMA, LAM, bootstrap[n].double())
        assert (advantages[n] - expected).abs().max() < 1e-5
        assert (found[n] - (expected + values[n].double())).abs().max() < 1e-5


def test_discounted_returns_against_float64():
    rewards, _, bootstrap = sequences()
    found = returns.discounted_returns(rewards, torch.ones(3, 30, dtype=torch.bool), GAMMA, bootstrap)
    powers = GAMMA ** torch.arange(31, dtype=torch.float64)
    everything = torch.cat([rewards, bootstrap[:, None]], dim=1).double()
    for t in range(30):
        assert ((everything[:, t:] * powers[: 31 - t]).sum(1) - found[:, t]).abs().max() < 1e-5


def test_returns_are_advantages_without_values():
    rewards, _, _ = sequences()
    mask = torch.rand(3, 30, generator=torch.Generator().manual_seed(0)) < 0.7
    advantages, found = returns.gae(rewards, torch.zeros(3, 30), mask, GAMMA, 1.0)
    assert torch.equal(advantages, returns.discounted_returns(rewards, mask, GAMMA))
    assert torch.equal(advantages, found)


def test_tokens_left_out_are_stepped_over():
    """The same numbers as of the sequence without them; what they hold, NaN too, does not matter."""
    rewards, values, bootstrap = sequences()
    mask = torch.rand(3, 30, generator=torch.Generator().manual_seed(1)) < 0.6
    hole = torch.where(mask, 0.0, float("nan"))
    advantages, found = returns.gae(rewards + hole, values + hole, mask, GAMMA, LAM, bootstrap)
    assert not advantages[~mask].any()
    assert not found[~mask].any()
    for n in range(3):
        kept = mask[n]
        short = returns.gae(rewards[n : n + 1, kept], values[n : n + 1, kept], kept[kept][None], GAMMA, LAM, bootstrap[n : n + 1])
        assert torch.equal(advantages[n, kept], short[0][0])
        assert torch.equal(found[n, kept], short[1][0])


def test_a_scan_runs_from_the_last_token_to_the_first():
    """1e20 and -1e20 meet before the 1 joins, or after it is lost."""
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert returns.discounted_returns(torch.tensor([[1.0, 1e20, -1e20]]), mask, 1.0)[0, 0] == 1.0
    assert returns.discounted_returns(torch.tensor([[1e20, -1e20, 1.0]]), mask, 1.0)[0, 0] == 0.0
    advantages, _ = returns.gae(torch.tensor([[1e20]]), torch.tensor([[1e20]]), mask[:, :1], 1.0, 1.0, torch.tensor([1.0]))
    assert advantages.item() == 0.0, "the reward takes the next value first"


@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (5, 200)])
def test_masked_mean_and_whitening_against_float64(shape):
    x = normal(*shape, dtype=torch.float32, seed=2)
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(2)) < 0.8
    mask[0, 0] = True
    kept = x[mask].double()
    assert abs(returns.masked_mean(x, mask) - kept.mean()) < 1e-6
    if len(kept) > 1:
        found = returns.masked_whiten(x, mask)
        assert (found[mask] - (kept - kept.mean()) / (kept.var() + 1e-8).sqrt()).abs().max() < 1e-5
        assert not found[~mask].any()


def test_a_masked_sum_adds_sequences_one_after_another():
    mask = torch.ones(3, 65, dtype=torch.bool)
    x = torch.zeros(3, 65)
    x[0, 0], x[1, 64], x[2, 3] = 1e20, 1.0, -1e20
    assert returns.masked_sum(x, mask) == 0.0
    assert returns.masked_sum(x[[0, 2, 1]], mask) == 1.0


def test_padding_behind_a_sequence_does_not_matter():
    x, mask = normal(4, 100, dtype=torch.float32), torch.ones(4, 100, dtype=torch.bool)
    padded, padded_mask = (torch.nn.functional.pad(t, (0, 77)) for t in (x, mask))
    assert torch.equal(returns.masked_mean(padded, padded_mask), returns.masked_mean(x, mask))
    assert torch.equal(returns.masked_whiten(padded, padded_mask)[:, :100], returns.masked_whiten(x, mask))
