"""The gradient norm, with the same bits for every layout."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

_FRACTION_BITS = 31  # of each of two integer digits: 2^32 gradients fit into int64 sums


def grad_norm_fp32(grads_for_norm, norm_type: int | float = 2, grad_stats_parallel_group: dist.ProcessGroup | None = None) -> float:
    """2-norm of all gradients of the group's ranks, with the same bits for every layout.

    Infinite if any gradient is infinite or no number. Squares are cut to 62 binary digits below the largest possible one and
    added as integers. Integer sums have no order, so no tree over parameters and shards is needed, and how the optimizer
    holds the gradients does not matter either.
    """
    if norm_type != 2:
        raise ValueError(f"gradient norm: expected the 2-norm, found norm_type={norm_type}")
    grads = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else grads_for_norm
    largest = torch.tensor(_largest(grads), dtype=torch.float64)
    largest = _over_ranks(largest, dist.ReduceOp.MAX, grad_stats_parallel_group).item()
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    exponent = math.frexp(largest)[1]
    digits = torch.zeros(2, dtype=torch.int64)
    for grad in grads:
        digits += _square_digits(grad, exponent)
    high, low = _over_ranks(digits, dist.ReduceOp.SUM, grad_stats_parallel_group).tolist()
    return math.sqrt(math.ldexp((high << _FRACTION_BITS) + low, 2 * (exponent - _FRACTION_BITS)))


def _largest(grads: list[torch.Tensor]) -> float:
    """Largest magnitude; infinity stands for NaN too, which a maximum would lose."""
    values = [float(grad.abs().max()) for grad in grads if grad.numel()]
    return max(values, default=0.0) if all(map(math.isfinite, values)) else math.inf


def _over_ranks(value: torch.Tensor, op, group: dist.ProcessGroup | None) -> torch.Tensor:
    dist.all_reduce(value, op=op, group=group)
    return value


def _square_digits(grad: torch.Tensor, exponent: int) -> torch.Tensor:
    """int64 [2]: sum of (g / 2^exponent)^2, cut to two digits of _FRACTION_BITS bits. Every step before the cut is exact in fp64."""
    base = 2.0**_FRACTION_BITS
    scaled = grad.detach().double() * 2.0**-exponent
    squares = scaled * scaled * base
    high = squares.to(torch.int64)
    low = ((squares - high.double()) * base).to(torch.int64)
    return torch.stack([high.sum(), low.sum()])
