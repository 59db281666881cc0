"""Losses of a micro-batch: per-token terms, then a token sum, scaled once after accumulation. Legend: T tokens, B sequences.

`exp` may be given as a faster function of equal bits.
"""

import torch

from megatron_ext.reference.elementary import exp
from megatron_ext.reference.sums import row_sum


def token_sum(terms_T: torch.Tensor, boundaries: list[int]) -> torch.Tensor:
    """fp32 scalar: the terms of a sequence by row_sum, sequences one after another."""
    total = torch.zeros(())
    for start, end in zip(boundaries[:-1], boundaries[1:], strict=True):
        total = total + row_sum(terms_T[start:end])
    return total


def importance_ratio(logprobs_T, old_T, boundaries: list[int], level: str, exp=exp) -> torch.Tensor:
    """exp(logprob - old) per token, or per sequence exp of the mean difference, repeated for its tokens."""
    difference_T = logprobs_T - old_T
    if level == "sequence":
        means = [
            (row_sum(difference_T[start:end]) / torch.tensor(float(end - start))).expand(end - start)
            for start, end in zip(boundaries[:-1], boundaries[1:], strict=True)
        ]
        difference_T = torch.cat(means)
    return exp(difference_T)


def clipped_terms(ratio_T, advantages_T, clip_low: float, clip_high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(max of the plain and the clipped loss, its derivative by the logprob): 0 where the clipped one is strictly larger."""
    plain_T = -(advantages_T * ratio_T)
    clipped_T = -(advantages_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high))
    return torch.maximum(plain_T, clipped_T), torch.where(clipped_T > plain_T, 0.0, plain_T)


def kl_terms(logprobs_T, reference_T, exp=exp) -> tuple[torch.Tensor, torch.Tensor]:
    """(r - log r - 1 with r = exp(reference - logprob), its derivative by the logprob 1 - r)."""
    difference_T = reference_T - logprobs_T
    ratio_T = exp(difference_T)
    return (ratio_T - difference_T) - 1.0, 1.0 - ratio_T
