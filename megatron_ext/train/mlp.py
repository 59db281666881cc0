"""The dense MLP block: fc1 [gate | up], SwiGLU, fc2."""

from __future__ import annotations

import torch
from megatron.core.transformer import mlp

from megatron_ext import ops
from megatron_ext.patches import hit


class MLP(mlp.MLP):
    """Megatron's MLP with its activation by `ops`. The linears come from the layer spec."""

    def forward(self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs) -> tuple[torch.Tensor, None]:
        """[s, b, H] -> ([s, b, H], no bias)."""
        hit("megatron.core.transformer.mlp:MLP")
        if per_token_scale is not None:
            raise ValueError("MLP: a per-token scale belongs to experts, whose outputs are weighted after fc2")
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(ops.swiglu(gate_up))
