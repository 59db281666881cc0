"""exp and log of our own: libm's bits vary by CPU."""

from __future__ import annotations

import torch

from megatron_ext.ops.backend import kernels
from megatron_ext.ops.checks import check_float32


def exp(x: torch.Tensor) -> torch.Tensor:
    """Elementwise fp32, any shape."""
    check_float32("exp", x=x)
    return kernels().exp(x)


def log(x: torch.Tensor) -> torch.Tensor:
    """Elementwise fp32, any shape."""
    check_float32("log", x=x)
    return kernels().log(x)
