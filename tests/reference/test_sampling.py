"""Sampling as specified: known answers of the generator, distributions, filters against float64, and what must not matter."""

import math

import pytest
import torch

from inputs import normal
from megatron_ext.reference import sampling
from megatron_ext.reference.elementary import exp
from megatron_ext.reference.logprob import vocab_exp_sum, vocab_max
from megatron_ext.reference.sums import pad_last

SEGMENTS = 8


def draw(logits, seeds=None, positions=None, temperature=None, top_k=None, top_p=None, min_p=None, segments=SEGMENTS):
    rows = len(logits)
    seeds = torch.arange(rows) if seeds is None else seeds
    positions = torch.zeros(rows, dtype=torch.int64) if positions is None else positions
    return sampling.sample(logits, seeds, positions, temperature, top_k, top_p, min_p, segments)


def test_philox_known_answers():
    """The vectors published with Random123."""
    assert sampling.philox((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = sampling.WORD
    assert sampling.philox((ones, ones), (ones,) * 4) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert sampling.philox((0xA4093822, 0x299F31D0), pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_a_draw_has_words_of_its_own():
    words = {sampling.words_of(seed, position) for seed in (-1, 0, 1, 2**32, -(2**63)) for position in (0, 1, 2**32)}
    assert len(words) == 15


def test_choice_by_hand():
    """Weights 1, 0, 2, 1: running sums 1, 1, 3, 4; u = 0, 1/4, 3/4, almost 1."""
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0])
    found = [sampling.choose(weights, word) for word in (0, (1 << 30) - 1, 1 << 30, 3 << 30, sampling.WORD)]
    assert found == [0, 0, 2, 3, 3]


def test_choice_adds_in_order():
    """1e20 swallows the 1 before it and the 1 behind it: neither can be reached by a sum of another order."""
    weights = torch.tensor([1.0, 1e20, 1.0, 0.0])
    assert {sampling.choose(weights, word << 8) for word in range(0, 1 << 24, 4099)} == {0, 1}


def test_a_subnormal_total_still_has_a_choice():
    assert sampling.choose(torch.tensor([0.0, 1e-45, 0.0]), sampling.WORD) == 1


def test_the_sum_of_an_unfiltered_row_is_that_of_its_logprob():
    logits = normal(1, 1000, dtype=torch.float32, scale=3)
    row_max = vocab_max(logits, 1000)
    expected = vocab_exp_sum(pad_last(logits, 16 * SEGMENTS), row_max, 1000, SEGMENTS)
    assert sampling.mass(exp(logits[0] - row_max), SEGMENTS) == expected


@pytest.mark.parametrize("temperature", [None, 0.5])
def test_frequencies_follow_the_probabilities(temperature):
    """1,500 draws over 70 tokens in five segments; a token's count within five standard deviations."""
    draws, logits = 1500, normal(1, 70, dtype=torch.float32, scale=1.5)
    scaled = None if temperature is None else torch.tensor([temperature])
    tokens, _ = draw(logits.expand(draws, -1), torch.full((draws,), 5), torch.arange(draws), scaled)
    probabilities = (logits[0].double() / (temperature or 1.0)).softmax(0)
    expected = draws * probabilities
    counts = tokens.bincount(minlength=70)
    assert ((counts - expected).abs() <= 5 * (expected * (1 - probabilities)).sqrt() + 1).all()


def test_neither_the_batch_nor_the_place_matters():
    logits = normal(6, 500, dtype=torch.float32, scale=2)
    seeds, positions, top_p = torch.arange(6) * 7 - 3, torch.arange(6) * 11, torch.tensor([0.3, 0.9, 1.0, 0.5, 0.99, 0.7])
    together = draw(logits, seeds, positions, top_p=top_p)
    order = torch.tensor([3, 0, 5, 2, 4, 1])
    shuffled = draw(logits[order], seeds[order], positions[order], top_p=top_p[order])
    alone = [draw(logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1], top_p=top_p[i : i + 1]) for i in range(6)]
    for i in range(2):
        assert torch.equal(together[i][order], shuffled[i])
        assert torch.equal(together[i], torch.cat([each[i] for each in alone]))


def test_top_k_keeps_the_lower_of_equal_tokens():
    logits = torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0, 3.0]])
    for k, last, kept in [(1, 1, [1]), (2, 3, [1, 3]), (4, 0, [0, 1, 3, 5]), (5, 2, [0, 1, 2, 3, 5]), (6, 4, [0, 1, 2, 3, 4, 5]), (9, 4, [0, 1, 2, 3, 4, 5])]:
        found = draw(logits, top_k=torch.tensor([k]))[1]
        assert found.tolist() == [last]
        assert sampling.support_mask(logits, found)[0].nonzero()[:, 0].tolist() == kept


def test_top_k_of_one_is_greedy():
    logits = normal(5, 300, dtype=torch.float32).round()
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert draw(logits, top_k=torch.ones(5, dtype=torch.int64))[0].tolist() == expected


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_against_float64(p):
    """The smallest set of the most likely tokens with a probability of at least p, where rounding decides nothing."""
    logits = normal(4, 400, dtype=torch.float32, scale=2)
    mask = sampling.support_mask(logits, draw(logits, top_p=torch.full((4,), p))[1])
    probabilities, order = logits.double().softmax(1).sort(1, descending=True)
    before = probabilities.cumsum(1) - probabilities
    assert ((before - p).abs() > 1e-6).all()
    assert torch.equal(mask, torch.zeros_like(mask).scatter(1, order, before < p))


def test_min_p_against_float64():
    logits, temperature = normal(4, 400, dtype=torch.float32, scale=2), torch.tensor([0.7, 1.0, 1.3, 2.0])
    min_p = torch.tensor([0.1, 0.01, 0.5, 1.0])
    mask = sampling.support_mask(logits, draw(logits, temperature=temperature, min_p=min_p)[1])
    probabilities = (logits.double() / temperature.double()[:, None]).softmax(1)
    ratio = probabilities / probabilities.amax(1, keepdim=True)
    assert torch.equal(mask, ratio >= min_p.double()[:, None] - 1e-9)


def test_filters_follow_each_other():
    """top-p counts what min-p and top-k have left: of four equal tokens half of the mass are two."""
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, -9.0]])
    assert draw(logits, top_k=torch.tensor([4]), top_p=torch.tensor([0.5]))[1].tolist() == [1]
    assert draw(logits, min_p=torch.tensor([0.5]), top_p=torch.tensor([0.79]))[1].tolist() == [3]
    assert draw(logits, top_k=torch.tensor([5]), min_p=torch.tensor([0.5]))[1].tolist() == [4]


def test_drawn_tokens_are_in_the_support():
    rows, logits = 200, normal(1, 300, dtype=torch.float32, scale=2)
    tokens, last = draw(logits.expand(rows, -1), top_p=torch.full((rows,), 0.6))
    assert len(set(tokens.tolist())) > 5
    assert sampling.support_mask(logits, last[:1])[0][tokens].all()


def test_tokens_that_are_shut_out_and_rows_without_a_token():
    logits = torch.full((5, 40), -math.inf)
    logits[0, 17] = -3.0
    logits[2], logits[3], logits[4] = 0.0, 0.0, 0.0
    logits[2, 5], logits[3, 5], logits[4, :39] = math.nan, math.inf, -math.inf
    tokens, last = draw(logits)
    assert tokens.tolist() == [17, -1, -1, -1, 39]
    assert last.tolist() == [40, -1, -1, -1, 40]
    assert sampling.support_mask(logits, last).sum(1).tolist() == [1, 0, 0, 0, 1]


def test_beam_step_by_hand():
    scores = torch.tensor([[-1.0, -2.0], [-1.0, -math.inf]])
    logprobs = torch.tensor([[[-1.0, -3.0, -2.0], [-1.0, 0.0, -9.0]], [[-2.0, -1.0, -1.0], [0.0, 0.0, 0.0]]])
    found, parents, tokens = sampling.beam_step(scores, logprobs, 4)
    assert found.tolist() == [[-2.0, -2.0, -3.0, -3.0], [-2.0, -2.0, -3.0, -math.inf]]
    assert parents.tolist() == [[0, 1, 0, 1], [0, 0, 0, -1]]
    assert tokens.tolist() == [[0, 1, 2, 0], [1, 2, 0, -1]]


def test_beam_search_finds_the_best_sequence():
    """Three steps that depend on nothing before: as many beams as sequences find the best of all."""
    logprobs = normal(3, 4, dtype=torch.float32).log_softmax(1)
    scores, best = torch.tensor([[0.0]]), [[]]
    for step in logprobs:
        scores, parents, tokens = sampling.beam_step(scores, step.expand(1, scores.shape[1], 4), min(64, 4 * scores.shape[1]))
        best = [[*best[parent], token] for parent, token in zip(parents[0].tolist(), tokens[0].tolist(), strict=True)]
    assert best[0] == logprobs.argmax(1).tolist()
    assert len({tuple(sequence) for sequence in best}) == 64
