"""SwiGLU. Legend: I intermediate width."""

from __future__ import annotations

import torch

from megatron_ext.ops.backend import kernels
from megatron_ext.ops.checks import check, check_model_dtype, rows


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return kernels().swiglu(rows(gate_up)).view(*gate_up.shape[:-1], -1)

    @staticmethod
    def backward(ctx, da):
        (gate_up,) = ctx.saved_tensors
        return kernels().swiglu_backward(rows(da), rows(gate_up)).view(gate_up.shape)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2I] stored [gate | up] -> [..., I]: silu(gate) * up in fp32, one rounding. Differentiable."""
    check_model_dtype("swiglu", gate_up=gate_up)
    check("swiglu", gate_up.shape[-1] % 2 == 0, f"the last dimension must be even, found {gate_up.shape[-1]}")
    if gate_up.numel() == 0:
        return gate_up[..., : gate_up.shape[-1] // 2]
    return SwiGLU.apply(gate_up)
