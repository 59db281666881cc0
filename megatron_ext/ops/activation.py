"""SwiGLU. Legend: I intermediate width."""

from __future__ import annotations

import torch

from megatron_ext.ops.backend import kernels
from megatron_ext.ops.checks import check, check_model_dtype


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2I] stored [gate | up] -> [..., I]: silu(gate) * up in fp32, one rounding. Differentiable."""
    check_model_dtype("swiglu", gate_up=gate_up)
    check("swiglu", gate_up.shape[-1] % 2 == 0, f"the last dimension must be even, found {gate_up.shape[-1]}")
    return kernels().swiglu(gate_up)
