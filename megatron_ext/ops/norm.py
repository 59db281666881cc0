"""RMSNorm and add + RMSNorm. Legend: H hidden."""

from __future__ import annotations

import torch

from megatron_ext.ops.backend import kernels
from megatron_ext.ops.checks import check, check_float32, check_model_dtype


def rms_norm_backward_(dw_H: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, w_H: torch.Tensor, eps: float) -> torch.Tensor:
    """dx [..., H] in the model dtype; the weight gradient is added into the fp32 accumulator dw, row after row."""
    check_model_dtype("rms_norm_backward_", dy=dy, x=x, w=w_H)
    check_float32("rms_norm_backward_", dw=dw_H)
    check("rms_norm_backward_", dw_H.is_contiguous(), f"dw must be contiguous, found strides {dw_H.stride()}")
    return kernels().rms_norm_backward_(dw_H, dy, x, w_H, eps)


def rms_norm(x: torch.Tensor, w_H: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., H] -> [..., H], rounded to the model dtype before the weight multiply and after it. Differentiable."""
    check_model_dtype("rms_norm", x=x, w=w_H)
    check("rms_norm", x.shape[-1:] == w_H.shape, f"x has H={x.shape[-1]}, w has shape {tuple(w_H.shape)}")
    return kernels().rms_norm(x, w_H, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, w_H: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm of the rounded sum, the rounded sum). Not differentiable: training adds and normalises apart, with equal bits."""
    check_model_dtype("add_rms_norm", x=x, residual=residual, w=w_H)
    return kernels().add_rms_norm(x, residual, w_H, eps)
