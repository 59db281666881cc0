"""Self-attention: rotary embedding and causal attention over real sequences. Legend: s, b, R = s x b rows, D head_dim."""

from __future__ import annotations

import math

import torch
from megatron.core.transformer import attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

from megatron_ext import ops
from megatron_ext.patches import hit
from megatron_ext.train import microbatch


class SelfAttention(attention.SelfAttention):
    """Megatron's self-attention; queries and keys leave `get_query_key_value_tensors` already rotated.

    Megatron's own rotation is skipped (`rotary_pos_emb` is dropped): positions come from the active micro-batch, and the
    tables from the function that the rollout uses too.
    """

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs) -> tuple[torch.Tensor, None]:
        """[s (/ ranks under sequence parallelism), b, H] -> (the same shape, no bias)."""
        hit("megatron.core.transformer.attention:SelfAttention")
        if kwargs.get("inference_context") is not None or kwargs.get("attention_bias") is not None:
            raise ValueError("SelfAttention: no adapter covers inference_context and attention_bias; vLLM is the rollout engine")
        return super().forward(hidden_states, attention_mask, **{**kwargs, "rotary_pos_emb": None})

    def get_query_key_value_tensors(self, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [s, b, heads, D], key and value [s, b, groups, D] of this rank; query and key normalised, then rotated."""
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        return self._rotate(query), self._rotate(key), value

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        layout = microbatch.current()
        rotary_dim = int(self.config.kv_channels * self.config.rotary_percent)
        cos, sin = ops.rope_tables(layout.positions_R, rotary_dim, self.config.rotary_base, x.dtype)
        return layout.unrows(ops.apply_rope(layout.rows(x), cos, sin))


class CoreAttention(MegatronModule):
    """Causal attention of every sequence with itself, for packed [T, heads, D] and padded [s, b, heads, D] inputs."""

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self" or attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(
                f"CoreAttention: expected causal self-attention, found {attention_type} attention with mask {attn_mask_type}"
            )
        self.layer_number = layer_number
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params=None,
    ) -> torch.Tensor:
        """Returns [T, heads, D] for packed inputs, else [s, b, heads x D]. Masks are not read: sequences are causal."""
        hit("megatron.core.transformer.dot_product_attention:DotProductAttention")
        if attention_bias is not None:
            raise ValueError("CoreAttention: no adapter covers attention_bias")
        layout = microbatch.current()
        packed = query.dim() == 3
        query, key, value = (x if packed else layout.rows(x) for x in (query, key, value))
        out = ops.attention_varlen(query, key, value, layout.cu_seqlens, self.softmax_scale)
        return out if packed else layout.unrows(out.flatten(1))
