"""Cross-rank exchange: bytes travel, sums are local and in the order of `reduction_order`.

`group` is a torch.distributed ProcessGroup whose rank order is the logical order (TP rank r owns segments r, r+1, ...).
Never a backend's own SUM: its order depends on message size, element position and rank. Which transport moves the bytes is
free, because the bits do not depend on it. Legend: P ranks, M rows, N columns.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_ext import ops

GATHER_PARTIALS_BELOW_BYTES = 1 << 16  # below this, one message of partials beats two of half the volume; the bits are the same


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """uint8 view of a contiguous tensor: a backend can neither round nor refuse the dtype."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def all_gather_stack(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[...] on every rank (equal shapes) -> [P, ...]."""
    world = dist.get_world_size(group)
    if world == 1:
        return x.unsqueeze(0)
    source = as_bytes(x)
    target = source.new_empty(world * source.numel())
    dist.all_gather_into_tensor(target, source, group=group)
    return target.view(x.dtype).view(world, *x.shape)


def all_gather_concat(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Concatenates the ranks' tensors along `dim`, in rank order."""
    if dist.get_world_size(group) == 1:
        return x
    return torch.cat(all_gather_stack(x, group).unbind(0), dim=dim)


def all_to_all_rows(x: torch.Tensor, output_splits: list[int], input_splits: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Sends input_splits[p] consecutive rows to rank p; returns the received rows in rank order."""
    if dist.get_world_size(group) == 1:
        return x
    row_bytes = x[:1].numel() * x.element_size() if x.shape[0] else x.new_empty(1, *x.shape[1:]).numel() * x.element_size()
    target = torch.empty(sum(output_splits) * row_bytes, dtype=torch.uint8, device=x.device)
    dist.all_to_all_single(
        target,
        as_bytes(x) if x.numel() else torch.empty(0, dtype=torch.uint8, device=x.device),
        output_split_sizes=[n * row_bytes for n in output_splits],
        input_split_sizes=[n * row_bytes for n in input_splits],
        group=group,
    )
    return target.view(x.dtype).view(sum(output_splits), *x.shape[1:])


def ordered_reduce_scatter(part_MN: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None = None) -> torch.Tensor:
    """fp32 [M, N] partials -> [M / P, N]: tree over ranks, one rounding. Raises ValueError unless P divides M."""
    world = dist.get_world_size(group)
    m = part_MN.shape[0]
    if m % world:
        raise ValueError(f"ordered_reduce_scatter: {m} rows cannot be scattered over {world} ranks; pad the sequence to a multiple of TP")
    splits = [m // world] * world
    received = all_to_all_rows(part_MN, splits, splits, group)
    return ops.ordered_sum(received.view(world, m // world, *part_MN.shape[1:]), dtype)


def ordered_all_reduce(part_MN: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None = None) -> torch.Tensor:
    """fp32 [M, ...] partials -> [M, ...] on every rank: tree over ranks, one rounding."""
    world = dist.get_world_size(group)
    if world == 1 or part_MN.shape[0] % world or part_MN.numel() * 4 < GATHER_PARTIALS_BELOW_BYTES:
        return ops.ordered_sum(all_gather_stack(part_MN, group), dtype)
    return all_gather_concat(ordered_reduce_scatter(part_MN, group, dtype), group, dim=0)


def select_nonzero_rows_sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum in which at most one rank's element has any bit set: exact, and -0 stays -0. For vocabulary-parallel embeddings."""
    stacked = all_gather_stack(x, group)
    bits = stacked.view(torch.int32 if x.element_size() == 4 else torch.int16)
    total = bits[0]
    for other in bits[1:]:
        total = total | other
    return total.view(x.dtype)


def max_all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Elementwise maximum over ranks: exact in any order; a maximum of zero is +0."""
    return all_gather_stack(x, group).amax(dim=0) + 0.0
