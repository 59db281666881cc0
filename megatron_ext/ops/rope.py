"""Rotary embedding. Legend: T tokens, D head size."""

from __future__ import annotations

import torch

from megatron_ext.ops.backend import kernels
from megatron_ext.ops.checks import check, check_model_dtype
from megatron_ext.reference import rope


def rope_tables(positions_T: torch.Tensor, rotary_dim: int, base: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 positions -> (cos, sin), each [T, rotary_dim / 2] in the model dtype. fp32 angles, fp64 functions of our own."""
    check("rope_tables", rotary_dim % 2 == 0, f"rotary_dim must be even, found {rotary_dim}")
    check("rope_tables", not positions_T.is_floating_point(), f"positions must be integers, found {positions_T.dtype}")
    return rope.rope_tables(positions_T, rotary_dim, base, dtype)


def apply_rope(x_ThD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] -> same; rotate-half on the first rotary_dim dimensions, fp32 products, one rounding. Differentiable in x."""
    check_model_dtype("apply_rope", x=x_ThD, cos=cos, sin=sin)
    check("apply_rope", x_ThD.shape[0] == cos.shape[0], f"x has {x_ThD.shape[0]} tokens, the tables {cos.shape[0]}")
    return kernels().apply_rope(x_ThD, cos, sin)
