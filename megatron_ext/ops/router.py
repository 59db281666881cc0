"""MoE router. Legend: T tokens, H hidden, E experts, k slots."""

from __future__ import annotations

import torch

from megatron_ext.ops.backend import active_order, kernels
from megatron_ext.ops.checks import check, check_float32, check_model_dtype
from megatron_ext.ops.linear import linear_fp32, wgrad_

SCORE_FUNCTIONS = ("softmax", "sigmoid")


class RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_EH):
        ctx.save_for_backward(x, w_EH)
        return linear_fp32(x, w_EH)

    @staticmethod
    def backward(ctx, dlogits):
        x, w_EH = ctx.saved_tensors
        dlogits = dlogits.to(x.dtype)
        dw = torch.zeros(w_EH.shape)
        wgrad_(dw, dlogits, x)
        return router_dgrad(dlogits, w_EH), dw.to(w_EH.dtype)


def router_dgrad(dlogits: torch.Tensor, w_EH: torch.Tensor) -> torch.Tensor:
    """[..., E] x [E, H] -> [..., H], all in the model dtype: one accumulator through all experts (E is not sharded), one rounding."""
    check_model_dtype("router_dgrad", dlogits=dlogits, w=w_EH)
    return kernels().dgrad(dlogits, w_EH, 1, False, active_order().mmad_order)


def router_logits(x: torch.Tensor, w_EH: torch.Tensor) -> torch.Tensor:
    """[..., H] x [E, H] -> fp32 [..., E]. Differentiable; dlogits are rounded to the model dtype before they are contracted."""
    check_model_dtype("router_logits", x=x, w=w_EH)
    return RouterLogits.apply(x, w_EH)


class Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TE, top_k, score_function, renormalize, scale, correction_bias, num_groups, topk_groups):
        weights, ids = kernels().route(
            logits_TE, top_k, score_function, renormalize, scale, correction_bias, num_groups, topk_groups
        )
        ctx.save_for_backward(logits_TE, ids)
        ctx.settings = (score_function, renormalize, scale)
        ctx.mark_non_differentiable(ids)
        return weights, ids

    @staticmethod
    def backward(ctx, dweights, _):
        logits_TE, ids = ctx.saved_tensors
        return kernels().route_backward(dweights, logits_TE, ids, *ctx.settings), *(None,) * 7


def route(
    logits_TE: torch.Tensor,
    top_k: int,
    score_function: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    correction_bias: torch.Tensor | None = None,
    num_groups: int | None = None,
    topk_groups: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [T, E] -> (fp32 weights [T, k], int64 expert ids [T, k]) by descending score, ties by lower expert index.

    softmax over all experts, then top-k, then (renormalize) division by the sum of the chosen. correction_bias [E] chooses
    experts and never enters a weight; group limits as in DeepSeek-V3 (best 2 per group with a bias, best 1 without).
    Differentiable through the weights.
    """
    check_float32("route", logits=logits_TE)
    experts = logits_TE.shape[1]
    check("route", score_function in SCORE_FUNCTIONS, f"score_function must be one of {SCORE_FUNCTIONS}, found {score_function!r}")
    check("route", 0 < top_k <= experts, f"top_k={top_k} of {experts} experts")
    if num_groups is not None:
        check("route", experts % num_groups == 0, f"{experts} experts cannot form {num_groups} groups")
        check("route", topk_groups is not None and 0 < topk_groups <= num_groups, f"topk_groups={topk_groups} of {num_groups} groups")
        kept = topk_groups * experts // num_groups
        check("route", top_k <= kept, f"top_k={top_k}, but {topk_groups} groups hold only {kept} experts")
        check("route", correction_bias is None or experts > num_groups, f"the best two of {num_groups} groups of one expert, as with a correction bias")
    return Route.apply(logits_TE.contiguous(), top_k, score_function, renormalize, scale, correction_bias, num_groups, topk_groups)
