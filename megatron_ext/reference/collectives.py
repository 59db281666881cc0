"""What the cross-rank sums must equal, computed from all ranks' inputs at once. Legend: P ranks, M rows."""

import torch

from megatron_ext.reference.sums import ordered_sum


def all_reduce(parts_PMN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What every rank receives: the tree over ranks, one rounding."""
    return ordered_sum(parts_PMN).to(dtype)


def reduce_scatter(parts_PMN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[P, M / P, N]: row p is what rank p receives."""
    return all_reduce(parts_PMN, dtype).unflatten(0, (parts_PMN.shape[0], -1))
