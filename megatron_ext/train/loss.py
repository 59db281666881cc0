"""The policy-gradient loss: a token sum, scaled once after accumulation (--calculate-per-token-loss)."""

from __future__ import annotations

import torch

from megatron_ext import ops


class PolicyGradientSum(torch.autograd.Function):
    """-sum(advantage x logprob) over the predicted tokens of a micro-batch, in fp32. Legend: P predicted tokens."""

    @staticmethod
    def forward(ctx, logprobs_P: torch.Tensor, advantages_P: torch.Tensor, cu_P: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(advantages_P)
        return -ops.token_sum(advantages_P * logprobs_P, cu_P)

    @staticmethod
    def backward(ctx, dloss: torch.Tensor):
        (advantages_P,) = ctx.saved_tensors
        return -(dloss * advantages_P), None, None
