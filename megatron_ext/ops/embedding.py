"""Embedding gradient. Legend: T tokens, V vocabulary rows of this rank, H hidden."""

from __future__ import annotations

import torch

from megatron_ext.ops.backend import kernels
from megatron_ext.ops.checks import check, check_float32


def embedding_wgrad_(main_grad_VH: torch.Tensor, ids: torch.Tensor, dy: torch.Tensor) -> None:
    """Adds the rows of dy [..., H] into main_grad at local ids [...] in token order; negative ids lie on another rank and are skipped."""
    check_float32("embedding_wgrad_", main_grad=main_grad_VH)
    check("embedding_wgrad_", main_grad_VH.is_contiguous(), f"main_grad must be contiguous, found strides {main_grad_VH.stride()}")
    largest = int(ids.max()) if ids.numel() else -1
    check("embedding_wgrad_", largest < main_grad_VH.shape[0], f"id {largest} of {main_grad_VH.shape[0]} rows")
    kernels().embedding_wgrad_(main_grad_VH, ids.to(torch.int64), dy)
