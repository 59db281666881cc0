"""Sampling of tokens from rows of logits, and a step of beam search. Logits are fp32. Legend: T tokens, V vocabulary, B requests, W beams, k kept beams.

The tokens of a row are ordered by descending logit, equal ones by ascending id. Every filter (min-p, top-k, then top-p over what those two leave)
keeps a prefix of that order, so what may be drawn is named by one token: the last of the prefix. The draw goes down the tree of the exponent sum,
from segment to block to token, with one word of a counter-based generator for each step. So a row's token is a function of that row, of its seed
and of its position alone, whatever else is in the batch.

A temperature is as in logprob.py. Filters are None or one value a row: top_k int64, 0 keeps all; top_p fp32 in (0, 1], 1 keeps all; min_p fp32 in
[0, 1], 0 keeps all. A logit of -inf is never drawn; a row with NaN, with +inf or without any finite logit has no token.
"""

import torch

from megatron_ext.reference.elementary import exp, log
from megatron_ext.reference.logprob import scale_logits, vocab_max
from megatron_ext.reference.sums import ordered_sum, pad_last, row_sum
from megatron_ext.reduction_order import FRACTAL, ROW_SUM_BLOCK

LOWEST = torch.finfo(torch.float32).min  # of the logits that can be drawn
NOTHING = -1  # in the place of a token: there is none
PHILOX_MULTIPLIERS, PHILOX_KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
WORD = (1 << 32) - 1


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): four words of 32 bits, all integers."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(PHILOX_ROUNDS):
        left, right = PHILOX_MULTIPLIERS[0] * c0, PHILOX_MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & WORD, (left >> 32) ^ c3 ^ k1, left & WORD
        k0, k1 = (k0 + PHILOX_KEY_STEPS[0]) & WORD, (k1 + PHILOX_KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def words_of(seed: int, position: int) -> tuple[int, int, int, int]:
    """The words of one draw: the seed, a 64-bit integer of any sign, is the key, the position in the response the counter."""
    return philox((seed & WORD, seed >> 32 & WORD), (position & WORD, position >> 32 & WORD, 0, 0))


def choose(weights_N: torch.Tensor, word: int) -> int:
    """Index of the weight in which `word` falls: running sums from +0 in order, c; the first c > u * c[-1] with u = the upper 24 bits / 2^24.

    Where that product is rounded up to c[-1], as with subnormal sums, the first c equal to c[-1] is taken: its weight is not 0 either.
    """
    running, total = [], torch.zeros(())
    for weight in weights_N:
        total = total + weight
        running.append(total)
    threshold = torch.tensor((word >> 8) * 2.0**-24) * total
    return next(i for i, c in enumerate(running) if c > threshold or c == total)


def blocks_of(x_V: torch.Tensor, segments: int) -> torch.Tensor:
    """[segments, blocks, 64] with +0 in the place of padding: the leaves of the exponent sum."""
    pieces = pad_last(x_V, FRACTAL * segments).view(segments, -1)
    return pad_last(pieces, ROW_SUM_BLOCK).unflatten(-1, (-1, ROW_SUM_BLOCK))


def mass(leaves_V: torch.Tensor, segments: int) -> torch.Tensor:
    """fp32 scalar: the sum of a row in the order of logprob.vocab_exp_sum. Adding a leaf never makes it smaller."""
    return ordered_sum(row_sum(blocks_of(leaves_V, segments).flatten(1)))


def descend(leaves_V: torch.Tensor, segments: int, words: tuple[int, ...]) -> int:
    """The token in which the words fall, in a row of weights that are not all zero."""
    blocks = blocks_of(leaves_V, segments)
    segment = choose(row_sum(blocks.flatten(1)), words[0])
    block = choose(ordered_sum(blocks[segment].movedim(-1, 0)), words[1])
    lane = choose(blocks[segment, block], words[2])
    width = pad_last(leaves_V, FRACTAL * segments).numel() // segments
    return segment * width + block * ROW_SUM_BLOCK + lane


def by_likelihood(logits_V: torch.Tensor) -> torch.Tensor:
    """int64 [V]: ids by descending logit, ties by lower id. -0 and +0 are equal."""
    return torch.sort(logits_V + 0.0, descending=True, stable=True).indices


def first_tokens(values_V: torch.Tensor, order_V: torch.Tensor, count: int) -> torch.Tensor:
    """The values of the first `count` tokens of an order, +0 in the place of the others."""
    kept = torch.zeros_like(values_V)
    kept[order_V[:count]] = values_V[order_V[:count]]
    return kept


def smallest_prefix(leaves_V: torch.Tensor, order_V: torch.Tensor, target: torch.Tensor, segments: int) -> int:
    """How many of the first tokens have a mass of at least `target`, by bisection: the mass only grows with the prefix."""
    below, enough = 0, order_V.numel()
    while enough - below > 1:
        count = (below + enough) // 2
        below, enough = (below, count) if mass(first_tokens(leaves_V, order_V, count), segments) >= target else (count, enough)
    return enough


def last_token(logits_V, below_max_V, top_k: int, top_p: torch.Tensor, log_min_p: torch.Tensor, segments: int) -> int:
    """The last token of the support; V if no filter is on. below_max_V: quotients by the temperature, minus their maximum."""
    vocabulary = logits_V.numel()
    order_V, finite_V = by_likelihood(logits_V), logits_V >= LOWEST
    count, last = int(finite_V.sum()), vocabulary
    if top_k > 0 or log_min_p > float("-inf"):
        count = min(top_k or vocabulary, int((finite_V & (below_max_V >= log_min_p)).sum()))
        last = int(order_V[count - 1])
    if top_p < 1.0:
        weights_V = first_tokens(exp(below_max_V), order_V, count)
        count = smallest_prefix(weights_V, order_V, top_p * mass(weights_V, segments), segments)
        last = int(order_V[count - 1])
    return last


def support_mask(logits_TV: torch.Tensor, last_T: torch.Tensor) -> torch.Tensor:
    """bool [T, V]: the tokens up to `last` in the order of likelihood. last: a token, V for all that can be drawn, NOTHING for none."""
    vocabulary = logits_TV.shape[1]
    last_T1, ids_V = last_T[:, None], torch.arange(vocabulary)
    at_last_T1 = logits_TV.gather(1, last_T1.clamp(0, vocabulary - 1))
    up_to_last_TV = (logits_TV > at_last_T1) | ((logits_TV == at_last_T1) & (ids_V <= last_T1))
    return torch.where(last_T1 == vocabulary, logits_TV >= LOWEST, up_to_last_TV & (last_T1 != NOTHING))


def sample(logits_TV, seeds_T, positions_T, temperature, top_k_T, top_p_T, min_p_T, segments: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, last), int64 [T] each: the token drawn in every row, and the last token of its support as in support_mask."""
    rows, vocabulary = logits_TV.shape
    top_k_T = torch.zeros(rows, dtype=torch.int64) if top_k_T is None else top_k_T
    top_p_T = torch.ones(rows) if top_p_T is None else top_p_T
    log_min_p_T = torch.full((rows,), float("-inf")) if min_p_T is None else log(min_p_T)
    row_max_T = vocab_max(logits_TV, vocabulary, temperature)
    below_max_TV = scale_logits(logits_TV, temperature) - row_max_T[:, None]
    tokens_T, last_T = torch.full((rows,), NOTHING), torch.full((rows,), NOTHING)
    for row in row_max_T.isfinite().nonzero()[:, 0].tolist():
        logits_V, below_max_V = logits_TV[row], below_max_TV[row]
        last_T[row] = last_token(logits_V, below_max_V, int(top_k_T[row]), top_p_T[row], log_min_p_T[row], segments)
        support_V = support_mask(logits_V[None], last_T[row : row + 1])[0]
        words = words_of(int(seeds_T[row]), int(positions_T[row]))
        tokens_T[row] = descend(torch.where(support_V, exp(below_max_V), 0.0), segments, words)
    return tokens_T, last_T


def beam_step(scores_BW: torch.Tensor, logprobs_BWV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(scores fp32, parents int64, tokens int64), [B, k] each: the k best continuations of a request's beams, the best one first.

    A continuation's score is score + logprob, rounded; ties go to the lower beam, then to the lower token. A sum that is -inf or NaN, as that of
    a beam which does not exist, is no continuation: where fewer than k are left, the score is -inf and parent and token are NOTHING.
    """
    vocabulary = logprobs_BWV.shape[2]
    totals = (scores_BW[:, :, None] + logprobs_BWV).flatten(1)
    totals = torch.where(totals == totals, totals, float("-inf"))
    best = torch.sort(totals, dim=1, descending=True, stable=True).indices[:, :k].contiguous()
    scores = totals.gather(1, best)
    exists = scores > float("-inf")
    return scores, torch.where(exists, best // vocabulary, NOTHING), torch.where(exists, best % vocabulary, NOTHING)
