"""MoE combine by the expert tree. Legend: R expert rows (token copies), T tokens, H hidden, E experts, P EP ranks."""

from __future__ import annotations

import torch

from megatron_ext.ops.backend import active_order, kernels
from megatron_ext.ops.checks import check, check_float32, check_model_dtype
from megatron_ext.ops.linear import ordered_sum


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens, num_experts, expert_range):
        ctx.save_for_backward(y_RH, weights_R, token_ids_R)
        segments = active_order().expert_segments(num_experts)
        return kernels().combine(y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens, num_experts, segments, expert_range)

    @staticmethod
    def backward(ctx, dout_TH):
        y_RH, weights_R, token_ids_R = ctx.saved_tensors
        rows = dout_TH[token_ids_R]
        dweights = kernels().row_sum(rows * y_RH.float()) if rows.shape[0] else torch.zeros_like(weights_R)
        return (rows * weights_R[:, None]).to(y_RH.dtype), dweights, *(None,) * 5


def combine(y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens: int, num_experts: int, expert_range=None) -> torch.Tensor:
    """Rows of experts, in any order -> fp32 [T, H]: leaf = fp32(weight) * fp32(y), ascending inside an expert segment, tree across.

    expert_range: (first, last) global experts whose rows are here, a whole subtree; default all. The result is that
    subtree's root: pass the ranks' roots to `combine_finish`. Differentiable in y and in the weights.
    """
    check_model_dtype("combine", y=y_RH)
    check_float32("combine", weights=weights_R)
    first, last = expert_range or (0, num_experts)
    ranks = num_experts // (last - first)
    active_order().check_expert_parallel(num_experts, ranks)
    check("combine", first % (last - first) == 0, f"experts [{first}, {last}) are not a subtree of {num_experts}")
    if expert_ids_R.numel():
        low, high = int(expert_ids_R.min()), int(expert_ids_R.max())
        check("combine", first <= low and high < last, f"rows of experts {low}..{high} lie outside [{first}, {last})")
    arguments = (x.contiguous() for x in (y_RH, weights_R, token_ids_R.to(torch.int64), expert_ids_R.to(torch.int64)))
    return Combine.apply(*arguments, num_tokens, num_experts, (first, last))


def combine_finish(parts_PTH: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 [P, T, H] roots of the EP ranks -> [T, H]: tree across ranks, +0 at the root, one rounding."""
    return (ordered_sum(parts_PTH) + 0.0).to(dtype)
