"""The operators of `ascendc_kernels`, behind the same functions as `reference_kernels`: `--kernel-backend ascendc`."""

from __future__ import annotations

import torch

from ascendc_kernels.library import load
from megatron_ext.ops.native import (
    attention,
    attention_backward,
    combine,
    dgrad_fp32,
    embedding_wgrad_,
    exp,
    linear_fp32,
    log,
    logprob_from_parts,
    route,
    route_backward,
    row_sum,
    swiglu,
    swiglu_backward,
    vocab_dlogits,
    vocab_exp_sum,
    wgrad_,
)

__all__ = [
    "add_rms_norm", "attention", "attention_backward", "combine", "dgrad_fp32", "embedding_wgrad_", "exp", "linear_fp32", "load", "log",
    "logprob_from_parts", "ordered_sum", "rms_norm", "rms_norm_backward_", "route", "route_backward", "row_sum", "swiglu", "swiglu_backward",
    "vocab_dlogits", "vocab_exp_sum", "wgrad_",
]  # fmt: skip


def ordered_sum(parts: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.ops.megatron_ext.ordered_sum(parts, dtype)


def rms_norm(x: torch.Tensor, w_H: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.ops.megatron_ext.rms_norm(x, w_H, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, w_H: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.megatron_ext.add_rms_norm(x, residual, w_H, eps)


def rms_norm_backward_(dw_H: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, w_H: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.ops.megatron_ext.rms_norm_backward_(dw_H, dy, x, w_H, eps)
