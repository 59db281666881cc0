"""The draw: a function of (logprobs, seed, position) only, with the right distribution."""

import pytest
import torch

from megatron_ext import ops
from megatron_ext.reduction_order import ReductionOrder
from megatron_ext.rollout.sampler import choose, gather_logprobs, uniform64


@pytest.fixture(autouse=True)
def configured():
    ops.configure(ReductionOrder(), "ascendc")


def distribution(rows: int = 3, vocabulary: int = 1000, seed: int = 0) -> torch.Tensor:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    return ops.log_softmax(logits)


def test_numbers_depend_on_seed_and_position_and_fill_64_bits():
    numbers = {uniform64(seed, position) for seed in range(50) for position in range(50)}
    assert len(numbers) == 2500
    assert max(numbers) >= 1 << 63 and min(numbers) < 1 << 60
    assert uniform64(-1, 0) == uniform64((1 << 64) - 1, 0)


def test_greedy_takes_the_lowest_of_the_most_likely():
    logprobs = torch.tensor([[-2.0, -1.0, -1.0, -3.0], [-1.0, -5.0, -5.0, -1.0]])
    assert choose(logprobs, [None, None]).tolist() == [1, 0]


def test_a_row_draws_the_same_alone_and_in_a_batch():
    logprobs = distribution(rows=5)
    numbers = [uniform64(seed, 3) for seed in range(4)] + [None]
    together = choose(logprobs, numbers).tolist()
    assert together == [int(choose(logprobs[i : i + 1], [numbers[i]])) for i in range(5)]


def test_frequencies_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    logprobs = ops.log_softmax(probabilities.log().unsqueeze(0))
    draws = torch.tensor([int(choose(logprobs, [uniform64(seed, 0)])) for seed in range(4000)])
    counts = torch.bincount(draws, minlength=5) / 4000
    assert (counts - probabilities).abs().max() < 0.03


def test_a_token_without_probability_is_never_drawn():
    logprobs = torch.tensor([[-float("inf"), 0.0, -float("inf")]])
    assert {int(choose(logprobs, [number])) for number in (0, 1 << 63, (1 << 64) - 1)} == {1}


def test_gathered_logprobs_start_with_the_sampled_token():
    logprobs = distribution()
    tokens = torch.tensor([5, 17, 999])
    found = gather_logprobs(logprobs, tokens, 2)
    assert found.logprob_token_ids[:, 0].tolist() == tokens.tolist()
    assert torch.equal(found.logprobs[:, 0], logprobs[torch.arange(3), tokens])
    assert torch.equal(found.logprobs[:, 1], logprobs.amax(-1))
    assert found.selected_token_ranks.tolist() == [int((row >= row[t]).sum()) for row, t in zip(logprobs, tokens)]
