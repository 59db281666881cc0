"""SwiGLU of vLLM's dense MLP over `ops.swiglu`."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.activation import SiluAndMul

from megatron_ext import ops
from megatron_ext.patches import hit

TARGET = "vllm.model_executor.layers.activation:SiluAndMul"


class OrderedSiluAndMul(SiluAndMul):
    """silu(gate) * up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., 2I], gate first -> [..., I]."""
        hit(TARGET)
        return ops.swiglu(x)
