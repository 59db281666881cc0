"""Token copies, and their combination by the expert tree. Legend: R expert rows (token copies), T tokens, H hidden, E experts, P EP ranks."""

from __future__ import annotations

import torch

from megatron_ext.ops.backend import active_order, kernels
from megatron_ext.ops.checks import check, check_float32, check_model_dtype
from megatron_ext.ops.linear import ordered_sum


def permute(x_TH: torch.Tensor, token_ids_R: torch.Tensor) -> torch.Tensor:
    """[T, H] -> [R, H]: the row of every copy's token. Not differentiable: `combine_rows` with weights of 1 is its gradient."""
    check_model_dtype("permute", x=x_TH)
    return kernels().permute(x_TH, token_ids_R)


def unpermute(rows_RH: torch.Tensor, index_R: torch.Tensor) -> torch.Tensor:
    """Row r goes to index[r], a permutation. Not differentiable: `permute` by the same index is its gradient."""
    check_model_dtype("unpermute", rows=rows_RH)
    return kernels().unpermute(rows_RH, index_R)


class Combine(torch.autograd.Function):
    """Of both forms: without an expert_range the whole tree, finished. The value is rounded, the derivative of rounding is one."""

    @staticmethod
    def forward(ctx, y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens, num_experts, expert_range):
        ctx.save_for_backward(y_RH, weights_R, token_ids_R)
        arguments = (y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens, num_experts, active_order().expert_segments(num_experts))
        return kernels().combine_rows(*arguments) if expert_range is None else kernels().combine(*arguments, expert_range)

    @staticmethod
    def backward(ctx, dout_TH):
        return *kernels().combine_backward(dout_TH.float(), *ctx.saved_tensors), *(None,) * 5


def check_combine(op: str, y_RH, weights_R, expert_ids_R, num_experts: int, expert_range: tuple[int, int]) -> None:
    check_model_dtype(op, y=y_RH)
    check_float32(op, weights=weights_R)
    first, last = expert_range
    active_order().check_expert_parallel(num_experts, num_experts // (last - first))
    check(op, first % (last - first) == 0, f"experts [{first}, {last}) are not a subtree of {num_experts}")
    if expert_ids_R.device.type == "cpu" and expert_ids_R.numel():
        low, high = int(expert_ids_R.min()), int(expert_ids_R.max())
        check(op, first <= low and high < last, f"rows of experts {low}..{high} lie outside [{first}, {last})")


def combine(y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens: int, num_experts: int, expert_range=None) -> torch.Tensor:
    """Rows of experts, in any order -> fp32 [T, H]: leaf = fp32(weight) * fp32(y), ascending inside an expert segment, tree across.

    expert_range: (first, last) global experts whose rows are here, a whole subtree; default all. The result is that
    subtree's root: pass the ranks' roots to `combine_finish`. token_ids, expert_ids: int64, a pair at most once.
    Differentiable in y and in the weights.
    """
    expert_range = expert_range or (0, num_experts)
    check_combine("combine", y_RH, weights_R, expert_ids_R, num_experts, expert_range)
    return Combine.apply(y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens, num_experts, expert_range)


def combine_rows(y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens: int, num_experts: int) -> torch.Tensor:
    """All rows of the tokens, in any order -> [T, H] in the model dtype: `combine` and `combine_finish` in one. Differentiable likewise."""
    check_combine("combine_rows", y_RH, weights_R, expert_ids_R, num_experts, (0, num_experts))
    return Combine.apply(y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens, num_experts, None)


def combine_finish(parts_PTH: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 [P, T, H] roots of the EP ranks -> [T, H]: tree across ranks, +0 at the root, one rounding."""
    return (ordered_sum(parts_PTH) + 0.0).to(dtype)
