"""The four ways in which numbers are added. Everything else in the project is built from them.

Legend: M rows, L contraction length of one piece, N columns, P partials.
"""

import torch

from megatron_ext.reduction_order import FRACTAL, ROW_SUM_BLOCK, OrderError, is_power_of_two


def ordered_sum(parts_PX: torch.Tensor) -> torch.Tensor:
    """Balanced binary tree over neighbours of the first dimension (a power of two)."""
    if not is_power_of_two(parts_PX.shape[0]):
        raise OrderError(f"a tree needs a power of two of partials, found {parts_PX.shape[0]}")
    while parts_PX.shape[0] > 1:
        parts_PX = parts_PX[0::2] + parts_PX[1::2]
    return parts_PX[0]


def pad_last(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Zero-pads the last dimension to a multiple."""
    missing = -x.shape[-1] % multiple
    if not missing:
        return x
    return torch.cat([x, x.new_zeros(*x.shape[:-1], missing)], dim=-1)


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum of the last dimension in blocks of 64: an adjacent-pair tree inside a block, blocks one after another from +0.

    This is what Ascend C documents for ReduceSum(count) of fp32 on A2/A3: a tree inside one repeat, repeats in order.
    """
    blocks = pad_last(x, ROW_SUM_BLOCK).unflatten(-1, (-1, ROW_SUM_BLOCK)).movedim(-1, 0)
    blocks = ordered_sum(blocks)
    total = torch.zeros_like(blocks[..., 0])
    for i in range(blocks.shape[-1]):
        total = total + blocks[..., i]
    return total


def contract(a_ML: torch.Tensor, b_LN: torch.Tensor, mmad_order: str, start_MN: torch.Tensor | None = None) -> torch.Tensor:
    """One piece of a contraction in fp32: a running accumulator through L in ascending order.

    The inputs hold model-dtype values in fp32, so every product is exact. `start_MN` continues an accumulator.
    """
    group = FRACTAL if mmad_order == "groups16" else 1
    a_ML = pad_last(a_ML, group)
    b_LN = pad_last(b_LN.T, group).T
    total = torch.zeros(a_ML.shape[0], b_LN.shape[1]) if start_MN is None else start_MN
    for first in range(0, a_ML.shape[1], group):
        products = a_ML[:, first : first + group].T[:, :, None] * b_LN[first : first + group, None, :]
        total = total + ordered_sum(products)
    return total


def contract_segments(a_MK: torch.Tensor, b_KN: torch.Tensor, segments: int, mmad_order: str) -> torch.Tensor:
    """A contraction cut into equal contiguous pieces, joined by the tree."""
    if a_MK.shape[1] % segments:
        raise OrderError(f"K={a_MK.shape[1]} cannot be cut into {segments} equal pieces")
    pieces = zip(a_MK.chunk(segments, dim=1), b_KN.chunk(segments, dim=0), strict=True)
    return ordered_sum(torch.stack([contract(a, b, mmad_order) for a, b in pieces]))
