"""Linear layers, of one weight or of experts: forward, input gradient, weight gradient. Legend: M rows, K in, N out, E experts, R rows of all of them."""

import torch

from megatron_ext.reference.sums import contract, contract_segments
from megatron_ext.reduction_order import FRACTAL


def linear_fp32(x_MK: torch.Tensor, w_NK: torch.Tensor, segments: int, mmad_order: str) -> torch.Tensor:
    return contract_segments(x_MK.float(), w_NK.float().T, segments, mmad_order)


def gated_rows(n: int, segments: int) -> torch.Tensor:
    """Row order in which piece s of a [gate | up] weight is gate piece s followed by up piece s."""
    return torch.arange(n).view(2, segments, n // (2 * segments)).transpose(0, 1).reshape(-1)


def dgrad_fp32(dy_MN: torch.Tensor, w_NK: torch.Tensor, segments: int, gated: bool, mmad_order: str) -> torch.Tensor:
    if gated:
        rows = gated_rows(w_NK.shape[0], segments)
        dy_MN, w_NK = dy_MN[:, rows], w_NK[rows]
    return contract_segments(dy_MN.float(), w_NK.float(), segments, mmad_order)


def anchor_rows(x_MK: torch.Tensor, boundaries: list[int]) -> torch.Tensor:
    """Zero-pads every sequence to whole blocks of 16 rows, so that a block never spans two sequences."""
    blocks = []
    for start, end in zip(boundaries[:-1], boundaries[1:], strict=True):
        blocks.append(x_MK[start:end])
        blocks.append(x_MK.new_zeros(-(end - start) % FRACTAL, x_MK.shape[1]))
    return torch.cat(blocks)


def wgrad(grad_NK: torch.Tensor, dy_MN: torch.Tensor, x_MK: torch.Tensor, boundaries: list[int], mmad_order: str) -> torch.Tensor:
    dy, x = anchor_rows(dy_MN.float(), boundaries), anchor_rows(x_MK.float(), boundaries)
    return contract(dy.T, x, mmad_order, start_MN=grad_NK)


def expert_rows(counts_E: torch.Tensor) -> list[slice]:
    """The rows of every expert, for rows sorted by expert."""
    ends = counts_E.cumsum(0).tolist()
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def grouped_linear_fp32(x_RK: torch.Tensor, w_ENK: torch.Tensor, counts_E: torch.Tensor, segments: int, mmad_order: str) -> torch.Tensor:
    parts = [linear_fp32(x_RK[rows], w_NK, segments, mmad_order) for rows, w_NK in zip(expert_rows(counts_E), w_ENK, strict=True)]
    return torch.cat(parts)


def grouped_dgrad_fp32(
    dy_RN: torch.Tensor, w_ENK: torch.Tensor, counts_E: torch.Tensor, segments: int, gated: bool, mmad_order: str
) -> torch.Tensor:
    parts = [dgrad_fp32(dy_RN[rows], w_NK, segments, gated, mmad_order) for rows, w_NK in zip(expert_rows(counts_E), w_ENK, strict=True)]
    return torch.cat(parts)


def grouped_wgrad(
    grads_ENK: list[torch.Tensor], dy_RN: torch.Tensor, x_RK: torch.Tensor, counts_E: torch.Tensor, boundaries: list[int], mmad_order: str
) -> list[torch.Tensor]:
    """`wgrad` of every expert. boundaries: rows at which another sequence or another expert starts, and R."""
    results = []
    for grad_NK, rows in zip(grads_ENK, expert_rows(counts_E), strict=True):
        own = sorted({rows.start, *(b for b in boundaries if rows.start < b < rows.stop), rows.stop})
        has_rows = rows.stop > rows.start
        results.append(wgrad(grad_NK, dy_RN[rows], x_RK[rows], [b - rows.start for b in own], mmad_order) if has_rows else grad_NK)
    return results
