"""Rotary embedding of vLLM over `ops`: tables from the one shared function, rounded to the model dtype."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from megatron_ext import ops
from megatron_ext.patches import hit
from megatron_ext.rollout.settings import RolloutError

TARGET = "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding"


class OrderedRotaryEmbedding(RotaryEmbedding):
    """The unscaled rotary embedding. Scaled ones are classes of their own in vLLM, and refused once the model is built."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if not self.is_neox_style:
            raise RolloutError("interleaved (GPT-J style) rotary embedding; the order contract knows the rotate-half form only")
        del self.apply_rotary_emb  # the stock kernel's module: nothing may reach it

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        """[max_position, rotary_dim]: cos, then sin. vLLM keeps it as the buffer `cos_sin_cache`."""
        positions = torch.arange(self.max_position_embeddings, dtype=torch.int64)
        return torch.cat(ops.rope_tables(positions, self.rotary_dim, self.base, self.dtype), dim=-1)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """positions [T]; query [T, Hq * D], key [T, Hkv * D] -> the same, rotated."""
        hit(TARGET)
        cos, sin = self.cos_sin_cache.index_select(0, positions.flatten()).chunk(2, dim=-1)
        return self._rotate(query, cos, sin), None if key is None else self._rotate(key, cos, sin)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = x.view(x.shape[0], -1, self.head_size)
        return ops.apply_rope(heads, cos, sin).view(x.shape)
