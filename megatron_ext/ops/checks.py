"""Argument checks shared by the ops. Error text carries the failed condition and the values."""

from __future__ import annotations

import torch

MODEL_DTYPES = (torch.bfloat16, torch.float16)


def check_model_dtype(op: str, **tensors: torch.Tensor) -> None:
    """Raises TypeError unless all tensors share one model dtype."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if len(set(dtypes.values())) != 1 or next(iter(dtypes.values())) not in MODEL_DTYPES:
        raise TypeError(f"{op}: expected one dtype out of bfloat16, float16 for all of {dtypes}")


def check_float32(op: str, **tensors: torch.Tensor) -> None:
    """Raises TypeError unless all tensors are fp32."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise TypeError(f"{op}: {name} must be float32, found {tensor.dtype}")


def check(op: str, condition: bool, message: str) -> None:
    """Raises ValueError naming the op."""
    if not condition:
        raise ValueError(f"{op}: {message}")
