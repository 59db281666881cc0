"""The gradient norm of Megatron's optimizer, with the same bits for every layout."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megatron_ext import ops


def grad_norm_fp32(grads_for_norm, norm_type: int | float = 2, grad_stats_parallel_group: dist.ProcessGroup | None = None) -> float:
    """2-norm of all gradients of the group's ranks, by ops.grad_norm. Infinite if any gradient is infinite or no number."""
    if norm_type != 2:
        raise ValueError(f"gradient norm: expected the 2-norm, found norm_type={norm_type}")
    grads = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else grads_for_norm
    mine = torch.tensor(ops.largest_magnitude(grads), dtype=torch.float64)
    largest = _over_ranks(mine, dist.ReduceOp.MAX, grad_stats_parallel_group).item()
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    digits = _over_ranks(ops.square_digits(grads, largest), dist.ReduceOp.SUM, grad_stats_parallel_group)
    return ops.norm_from_digits(digits, largest)


def _over_ranks(value: torch.Tensor, op, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Maxima and sums of integers are exact in any order."""
    dist.all_reduce(value, op=op, group=group)
    return value
