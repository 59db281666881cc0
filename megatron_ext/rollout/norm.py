"""RMSNorm of vLLM over `ops`: the residual sum is rounded to the model dtype before it is normalised."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.layernorm import RMSNorm

from megatron_ext import ops
from megatron_ext.patches import hit
from megatron_ext.rollout.settings import RolloutError

TARGET = "vllm.model_executor.layers.layernorm:RMSNorm"


class OrderedRMSNorm(RMSNorm):
    """RMSNorm with or without the residual add in front."""

    def __init__(self, hidden_size: int, *args, **kwargs):
        super().__init__(hidden_size, *args, **kwargs)
        if not self.has_weight or self.variance_size_override is not None:
            raise RolloutError(
                f"RMSNorm over {hidden_size}: has_weight={self.has_weight}, var_hidden_size={self.variance_size_override}; "
                "the order contract knows the plain weighted norm only"
            )

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x [..., H] -> normed [..., H]; with a residual [..., H]: (normed, x + residual rounded)."""
        hit(TARGET)
        if residual is None:
            return ops.rms_norm(x, self.weight.data, self.variance_epsilon)
        return ops.add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)
