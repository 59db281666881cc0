"""Losses of a micro-batch. Legend: T tokens, B sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ext.ops.checks import check, check_float32
from megatron_ext.ops.elementary import exp
from megatron_ext.reference import loss

IMPORTANCE_LEVELS = ("token", "sequence")
# How the losses of tokens become one number: the mean over all tokens (DAPO), or over sequences of the mean over their tokens (GRPO).
AGGREGATIONS = ("token-mean", "seq-mean-token-mean")


@dataclass(frozen=True)
class PolicyObjective:
    """The clipped surrogate of PPO (arXiv:1707.06347) as GRPO (arXiv:2402.03300) uses it, with KL to a reference policy.

    clip_low, clip_high: the ratio counts within [1 - clip_low, 1 + clip_high] (equal in GRPO, high > low in DAPO,
    arXiv:2503.14476). kl_coef: weight of the estimator r - log r - 1, r = reference / policy probability. importance_level:
    ratio of every token, or of the whole sequence, length-normalised (GSPO, arXiv:2507.18071).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    importance_level: str = "token"

    def __post_init__(self) -> None:
        check("PolicyObjective", 0 <= self.clip_low <= 1 and 0 <= self.clip_high,
              f"expected 0 <= clip_low <= 1 and clip_high >= 0, found {self.clip_low} and {self.clip_high}")  # fmt: skip
        check("PolicyObjective", self.kl_coef >= 0, f"expected kl_coef >= 0, found {self.kl_coef}")
        check("PolicyObjective", self.importance_level in IMPORTANCE_LEVELS,
              f"importance_level: expected one of {IMPORTANCE_LEVELS}, found {self.importance_level!r}")  # fmt: skip


def token_sum(terms_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """fp32 [T], int32 [B + 1] -> fp32 scalar: each sequence by the row-sum order, sequences one after another. Not differentiable."""
    check_float32("token_sum", terms=terms_T)
    return loss.token_sum(terms_T, _boundaries("token_sum", terms_T, cu_seqlens))


def policy_gradient_terms(
    logprobs_T: torch.Tensor, advantages_T: torch.Tensor, weights_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [T] each -> (-advantage x logprob, its derivative by the logprobs), times the weights."""
    check_float32("policy_gradient_terms", logprobs=logprobs_T, advantages=advantages_T, weights=weights_T)
    return weights_T * -(advantages_T * logprobs_T), weights_T * -advantages_T


def policy_terms(
    logprobs_T: torch.Tensor,
    old_T: torch.Tensor,
    advantages_T: torch.Tensor,
    weights_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    objective: PolicyObjective,
    reference_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All fp32 [T] -> (loss terms, their derivative by the logprobs), both fp32 [T] and times the weights. Not differentiable.

    The derivative of the "sequence" level is that of the sequence's sum; it is exact when the weights of a sequence are equal.
    """
    check_float32("policy_terms", logprobs=logprobs_T, old=old_T, advantages=advantages_T, weights=weights_T)
    boundaries = _boundaries("policy_terms", logprobs_T, cu_seqlens)
    ratio_T = loss.importance_ratio(logprobs_T, old_T, boundaries, objective.importance_level, exp=exp)
    terms_T, slope_T = loss.clipped_terms(ratio_T, advantages_T, objective.clip_low, objective.clip_high)
    if objective.kl_coef:
        check("policy_terms", reference_T is not None, "kl_coef > 0 needs logprobs of the reference policy")
        check_float32("policy_terms", reference=reference_T)
        kl_T, kl_slope_T = loss.kl_terms(logprobs_T, reference_T, exp=exp)
        terms_T, slope_T = terms_T + objective.kl_coef * kl_T, slope_T + objective.kl_coef * kl_slope_T
    return weights_T * terms_T, weights_T * slope_T


def _boundaries(name: str, terms_T: torch.Tensor, cu_seqlens: torch.Tensor) -> list[int]:
    boundaries = cu_seqlens.tolist()
    check(name, boundaries[-1] == terms_T.shape[0], f"cu_seqlens ends at {boundaries[-1]}, {terms_T.shape[0]} terms")
    return boundaries
