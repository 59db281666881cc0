"""The loss of a micro-batch: a token sum, scaled once after accumulation (--calculate-per-token-loss). Legend: P predicted tokens."""

from __future__ import annotations

import torch

from megatron_ext import ops
from megatron_ext.train.batch import MicroBatch


class LossSum(torch.autograd.Function):
    """Sum of fp32 terms [P] whose derivative by the logprobs [P] is known."""

    @staticmethod
    def forward(ctx, logprobs_P: torch.Tensor, terms_P: torch.Tensor, slope_P: torch.Tensor, cu_P: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slope_P)
        return ops.token_sum(terms_P, cu_P)

    @staticmethod
    def backward(ctx, dloss: torch.Tensor):
        (slope_P,) = ctx.saved_tensors
        return dloss * slope_P, None, None, None


def loss_count(batch: MicroBatch, aggregation: str) -> int:
    """What the sum of the terms is divided by, for this micro-batch's part."""
    return batch.num_tokens if aggregation == "token-mean" else batch.num_sequences


def loss_terms(
    logprobs_P: torch.Tensor, batch: MicroBatch, objective: ops.PolicyObjective | None, aggregation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(terms, slope), fp32 [P]. objective None: -advantage x logprob, the plain policy gradient; with advantages 1, supervised."""
    logprobs_P = logprobs_P.detach()
    advantages_P = batch.per_token(lambda sequence: sequence.advantage)
    weights_P = batch.per_token(lambda sequence: 1.0 if aggregation == "token-mean" else 1.0 / sequence.response_len)
    if objective is None:
        return ops.policy_gradient_terms(logprobs_P, advantages_P, weights_P)
    old_P = batch.logprobs("old_logprobs", instead_P=logprobs_P)
    reference_P = batch.logprobs("reference_logprobs", instead_P=logprobs_P)
    return ops.policy_terms(logprobs_P, old_P, advantages_P, weights_P, batch.prediction.cu_P, objective, reference_P)
