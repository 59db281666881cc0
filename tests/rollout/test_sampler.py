"""The draw: a function of (logits, seed, position) only, with the right distribution."""

from types import SimpleNamespace

import pytest
import torch

from megatron_ext import ops
from megatron_ext.reduction_order import ReductionOrder
from megatron_ext.rollout.sampler import as_int64, check_rows, choose, finite_rows, gather_logprobs
from megatron_ext.rollout.settings import LABEL, RolloutError


@pytest.fixture(autouse=True)
def configured():
    ops.configure(ReductionOrder(), "ascendc")


def logits_of(rows: int = 3, vocabulary: int = 1000, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def drawn(logits: torch.Tensor, seeds: list[int | None], positions: list[int], temperature: float = 1.0) -> list[int]:
    return choose(logits, torch.full((len(logits),), temperature), seeds, positions).tolist()


@pytest.mark.parametrize("backend", ["ascendc", "reference"])
def test_tokens_are_fixed_for_good(backend):
    """A run can be continued by a later version: a seed and a position draw the same token in every one, on either backend."""
    ops.configure(ReductionOrder(), backend)
    assert drawn(logits_of(4), [7, 1 << 62, (1 << 64) - 3, None], [0, 5, 1 << 33, 0], 0.7) == [538, 472, 228, 141]


def test_seeds_have_64_bits_of_any_sign():
    assert [as_int64(seed) for seed in (0, 5, -1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)] == [0, 5, -1, (1 << 63) - 1, -(1 << 63), -1]
    row = logits_of(1).expand(4, -1)
    first, second, low, high = drawn(row, [-1, (1 << 64) - 1, 5, 5 + (1 << 40)], [3] * 4)
    assert first == second and low != high


def test_seeds_and_positions_draw_anew():
    row = torch.zeros(1, 4096).expand(40, -1)
    assert len(set(drawn(row, list(range(40)), [0] * 40))) > 30
    assert len(set(drawn(row, [1] * 40, list(range(40))))) > 30


def test_greedy_takes_the_lowest_of_the_most_likely():
    logits = torch.tensor([[-2.0, -1.0, -1.0, -3.0], [-1.0, -5.0, -5.0, -1.0], [-0.0, -7.0, 0.0, -1.0]])
    assert drawn(logits, [None] * 3, [0, 1, 2]) == [1, 0, 0]


def test_a_row_draws_the_same_alone_and_in_a_batch():
    logits, seeds = logits_of(rows=5), [0, 1, 2, 3, None]
    together = drawn(logits, seeds, [3] * 5)
    assert together == [drawn(logits[i : i + 1], seeds[i : i + 1], [3])[0] for i in range(5)]
    assert together[4] == logits[4].argmax()


def test_frequencies_follow_the_distribution():
    """At temperature 1/2 probabilities are squared, then normalised."""
    probabilities, draws = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]), 4000
    logits = probabilities.log().expand(draws, -1)
    for temperature, power in ((1.0, 1), (0.5, 2)):
        counts = torch.bincount(torch.tensor(drawn(logits, list(range(draws)), [0] * draws, temperature)), minlength=5)
        expected = probabilities**power / (probabilities**power).sum()
        assert (counts / draws - expected).abs().max() < 0.03


def test_a_token_without_probability_is_never_drawn():
    logits = torch.tensor([[-float("inf"), 0.0, -float("inf")]]).expand(200, -1)
    assert set(drawn(logits, list(range(200)), [0] * 200)) == {1}


def test_gathered_logprobs_start_with_the_sampled_token():
    logprobs = ops.log_softmax(logits_of())
    tokens = torch.tensor([5, 17, 999])
    found = gather_logprobs(logprobs, tokens, 2)
    assert found.logprob_token_ids[:, 0].tolist() == tokens.tolist()
    assert torch.equal(found.logprobs[:, 0], logprobs[torch.arange(3), tokens])
    assert torch.equal(found.logprobs[:, 1], logprobs.amax(-1))
    assert found.selected_token_ranks.tolist() == [int((row >= row[t]).sum()) for row, t in zip(logprobs, tokens)]


@pytest.mark.parametrize("vocabulary", [1, 7, 1000])
def test_rows_that_are_not_finite_are_found(vocabulary):
    for place in {0, vocabulary // 2, vocabulary - 1}:
        logits = logits_of(4, vocabulary)
        logits[1, place], logits[2, place], logits[3, place] = float("nan"), float("inf"), -float("inf")
        assert finite_rows(logits).tolist() == [True, False, False, False]


def test_a_row_without_a_token_is_named():
    """By the label of its request, or else by the request's name."""
    logits = torch.tensor([[1.0, 3e38], [1.0, 2.0], [1.0, 3e38]])
    tokens = choose(logits, torch.tensor([1.0, 0.5, 0.5]), [1, 2, 3], [0, 0, 0])
    assert (tokens >= 0).tolist() == [True, True, False]

    def request(extra):
        return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra), req_id="request 7", output_token_ids=[5, 6])

    for extra, name in (({LABEL: "prompt 3 sample 1"}, "prompt 3 sample 1"), (None, "request 7")):
        with pytest.raises(RolloutError, match=f"overflow: {name}, response position 2"):
            check_rows(tokens >= 0, [request(None), request(None), request(extra)], "overflow")
    check_rows(tokens[:2] >= 0, [request(None)] * 2, "overflow")
