"""Linear layers in the segment tree. Legend: M rows, K in, N out, P partials, R expert rows, E experts.

Products of model-dtype inputs are exact in fp32, so a kernel may fuse them into the add.
"""

from __future__ import annotations

import torch

from megatron_ext.ops.backend import active_order, kernels
from megatron_ext.ops.checks import check, check_float32, check_model_dtype
from megatron_ext.reduction_order import FRACTAL


def check_linear(op: str, x: torch.Tensor, w_NK: torch.Tensor, segments: int) -> None:
    check_model_dtype(op, x=x, w=w_NK)
    check(op, x.shape[-1] == w_NK.shape[1], f"x has K={x.shape[-1]}, w has K={w_NK.shape[1]}")
    check(op, w_NK.shape[1] % (FRACTAL * segments) == 0, f"K={w_NK.shape[1]} is not a multiple of {FRACTAL} x {segments} segments")


def linear_fp32(x: torch.Tensor, w_NK: torch.Tensor, segments: int | None = None) -> torch.Tensor:
    """[..., K] x [N, K] -> fp32 [..., N]: the root over `segments` equal pieces of this K, not rounded.

    A TP=n rank of a row-parallel layer passes its K shard and order.segments // n. Default: order.segments.
    """
    order = active_order()
    segments = segments or order.segments
    check_linear("linear_fp32", x, w_NK, segments)
    return kernels().linear_fp32(x, w_NK, segments, order.mmad_order)


def linear(x: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """[..., K] x [N, K] -> [..., N] in the model dtype, one rounding."""
    check_linear("linear", x, w_NK, active_order().segments)
    return kernels().linear(x, w_NK, active_order().segments, active_order().mmad_order)


def check_dgrad(op: str, dy: torch.Tensor, w_NK: torch.Tensor, segments: int, gated: bool) -> None:
    check_model_dtype(op, dy=dy, w=w_NK)
    n = w_NK.shape[0]
    check(op, dy.shape[-1] == n, f"dy has N={dy.shape[-1]}, w has N={n}")
    check(op, n % (segments * (2 if gated else 1)) == 0, f"N={n} cannot be cut into {segments} segments (gated={gated})")


def dgrad_fp32(dy: torch.Tensor, w_NK: torch.Tensor, segments: int | None = None, gated: bool = False) -> torch.Tensor:
    """[..., N] x [N, K] -> fp32 [..., K], contracted over N in `segments` pieces.

    gated: N is stored [gate | up]; piece s is gate piece s followed by up piece s, whatever the TP of the storage.
    """
    order = active_order()
    segments = segments or order.segments
    check_dgrad("dgrad_fp32", dy, w_NK, segments, gated)
    return kernels().dgrad_fp32(dy, w_NK, segments, gated, order.mmad_order)


def dgrad(dy: torch.Tensor, w_NK: torch.Tensor, gated: bool = False) -> torch.Tensor:
    """[..., N] x [N, K] -> [..., K] in the model dtype: `dgrad_fp32` over all segments, one rounding."""
    order = active_order()
    check_dgrad("dgrad", dy, w_NK, order.segments, gated)
    return kernels().dgrad(dy, w_NK, order.segments, gated, order.mmad_order)


def wgrad_(main_grad_NK: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> None:
    """Adds dy^T x into the fp32 accumulator, row after row, in blocks of 16 rows anchored at each sequence's start.

    cu_seqlens: int32 [B + 1] row boundaries; None: the rows are one sequence.
    """
    check_model_dtype("wgrad_", dy=dy, x=x)
    check_float32("wgrad_", main_grad=main_grad_NK)
    shape = (dy.shape[-1], x.shape[-1])
    check("wgrad_", main_grad_NK.shape == shape, f"main_grad is {tuple(main_grad_NK.shape)}, dy and x give {shape}")
    check("wgrad_", main_grad_NK.is_contiguous(), f"main_grad must be contiguous, found strides {main_grad_NK.stride()}")
    rows = x.numel() // max(x.shape[-1], 1)
    boundaries = [0, rows] if cu_seqlens is None else cu_seqlens.tolist()
    check("wgrad_", boundaries[-1] == rows and dy.shape[:-1] == x.shape[:-1],
          f"dy is {tuple(dy.shape)}, x is {tuple(x.shape)}, cu_seqlens ends at {boundaries[-1]}")  # fmt: skip
    kernels().wgrad_(main_grad_NK, dy, x, boundaries, active_order().mmad_order)


def ordered_sum(parts: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[P, ...] fp32 -> [...]: binary tree over neighbours (P a power of two), then one optional rounding."""
    check_float32("ordered_sum", parts=parts)
    return kernels().ordered_sum(parts, dtype)


def check_grouped(op: str, x: torch.Tensor, w_ENK: torch.Tensor, counts_E: torch.Tensor) -> None:
    check(op, counts_E.shape == w_ENK.shape[:1], f"counts are {tuple(counts_E.shape)}, the weights of {w_ENK.shape[0]} experts were given")
    if x.device.type == "cpu":  # on a device nobody waits for the router's counts
        total = int(counts_E.sum())
        check(op, total == x.shape[0], f"counts sum to {total}, but there are {x.shape[0]} rows")


def grouped_linear(x_RK: torch.Tensor, w_ENK: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """Rows sorted by expert -> [R, N], one rounding. A row's bits never depend on other rows or on the counts (int64)."""
    check_linear("grouped_linear", x_RK, w_ENK[0], active_order().segments)
    check_grouped("grouped_linear", x_RK, w_ENK, counts_E)
    return kernels().grouped_linear(x_RK, w_ENK, counts_E, active_order().segments, active_order().mmad_order)


def grouped_dgrad_fp32(
    dy_RN: torch.Tensor, w_ENK: torch.Tensor, counts_E: torch.Tensor, segments: int | None = None, gated: bool = False
) -> torch.Tensor:
    """Rows sorted by expert -> fp32 dx [R, K], the root over `segments` pieces of this N, not rounded (see dgrad_fp32)."""
    order = active_order()
    segments = segments or order.segments
    check_dgrad("grouped_dgrad_fp32", dy_RN, w_ENK[0], segments, gated)
    check_grouped("grouped_dgrad_fp32", dy_RN, w_ENK, counts_E)
    return kernels().grouped_dgrad_fp32(dy_RN, w_ENK, counts_E, segments, gated, order.mmad_order)


def grouped_dgrad(dy_RN: torch.Tensor, w_ENK: torch.Tensor, counts_E: torch.Tensor, gated: bool = False) -> torch.Tensor:
    """Rows sorted by expert -> dx [R, K], one rounding."""
    order = active_order()
    check_dgrad("grouped_dgrad", dy_RN, w_ENK[0], order.segments, gated)
    check_grouped("grouped_dgrad", dy_RN, w_ENK, counts_E)
    return kernels().grouped_dgrad(dy_RN, w_ENK, counts_E, order.segments, gated, order.mmad_order)


def grouped_wgrad_(
    main_grads_ENK: list[torch.Tensor], dy_RN: torch.Tensor, x_RK: torch.Tensor, counts_E: torch.Tensor, boundaries: torch.Tensor
) -> None:
    """`wgrad_` of every expert. An accumulator of an expert without rows is not touched.

    boundaries: int64, rows at which another sequence or another expert starts, and R.
    """
    check_model_dtype("grouped_wgrad_", dy=dy_RN, x=x_RK)
    shape = (dy_RN.shape[1], x_RK.shape[1])
    for grad_NK in main_grads_ENK:
        check_float32("grouped_wgrad_", main_grads=grad_NK)
        check("grouped_wgrad_", grad_NK.shape == shape, f"a main_grad is {tuple(grad_NK.shape)}, dy and x give {shape}")
    kernels().grouped_wgrad_(main_grads_ENK, dy_RN, x_RK, counts_E, boundaries, active_order().mmad_order)
