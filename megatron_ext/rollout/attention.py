"""Attention backend of vLLM over `ops.attention_paged`: one kernel core for prefill, chunked prefill and decode.

vLLM gives each layer pages [blocks, page, kv_heads, 2 D]; one page is used as a K page followed by a V page, so that a
page's bytes stay together (vLLM zeroes, counts and frees whole pages).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from megatron_ext import ops
from megatron_ext.patches import hit
from megatron_ext.reduction_order import FRACTAL
from megatron_ext.rollout.settings import RolloutError

TARGET = "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend"


class OrderedAttentionBackend(AttentionBackend):
    """Causal decoder attention in the contract's order. Registered in place of CPU_ATTN."""

    supported_dtypes = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes = ["auto", "bfloat16", "float16"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int]:
        """Page sizes that divide the KV tile: a tile then never ends inside a page."""
        tile = ops.active_order().kv_tile
        return [page for page in range(FRACTAL, tile + 1, FRACTAL) if tile % page == 0]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)

    @staticmethod
    def get_impl_cls() -> type[OrderedAttention]:
        return OrderedAttention

    @staticmethod
    def get_builder_cls() -> type[OrderedMetadataBuilder]:
        return OrderedMetadataBuilder


@dataclass
class OrderedMetadata(AttentionMetadata):
    """One batch. cu_query_lens int32 [B + 1]; kv_lens int32 [B]; block_tables int32 [B, max_pages]."""

    num_tokens: int
    cu_query_lens: torch.Tensor
    kv_lens: torch.Tensor
    block_tables: torch.Tensor


class OrderedMetadataBuilder(AttentionMetadataBuilder[OrderedMetadata]):
    """Turns vLLM's batch description into the kernel's; decode and prefill rows need no telling apart."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> OrderedMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise RolloutError(f"{self.layer_names[0]}: non-causal attention; the order contract knows causal attention only")
        return OrderedMetadata(
            num_tokens=common.num_actual_tokens,
            cu_query_lens=common.query_start_loc[: common.num_reqs + 1],
            kv_lens=common.seq_lens[: common.num_reqs],
            block_tables=common.block_table_tensor[: common.num_reqs],
        )


class OrderedAttention(AttentionImpl[OrderedMetadata]):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **extra,
    ) -> None:
        options = {
            "alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name, **extra,
        }  # fmt: skip
        found = [f"{name}={value!r}" for name, value in options.items() if value]
        if attn_type != AttentionType.DECODER:
            found.append(f"attn_type={attn_type!r}")
        if kv_cache_dtype not in OrderedAttentionBackend.supported_kv_cache_dtypes:
            found.append(f"kv_cache_dtype={kv_cache_dtype!r}")
        if found:
            raise RolloutError(
                f"attention with {', '.join(found)}; the order contract knows plain causal attention with an unquantised cache"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ) -> torch.Tensor:
        """query [T, Hq, D], the cache already holding this batch's keys -> output [T, Hq, D], written in place.

        Rows beyond the batch's tokens are padding and left alone. Without metadata vLLM only measures memory.
        """
        if output_scale is not None or output_block_scale is not None:
            raise RolloutError("quantised attention output; give an unquantised model")
        if attn_metadata is None:
            return output.zero_()
        hit(TARGET)
        tokens = attn_metadata.num_tokens
        k_cache, v_cache = _pages(kv_cache)
        output[:tokens] = ops.attention_paged(
            query[:tokens], k_cache, v_cache, attn_metadata.block_tables, attn_metadata.cu_query_lens,
            attn_metadata.kv_lens, self.scale,
        )  # fmt: skip
        return output

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Writes key and value [T, Hkv, D] to their slots int64 [T]; slots < 0 are padding."""
        tokens = slot_mapping.shape[0]
        ops.write_kv_cache(key[:tokens], value[:tokens], *_pages(kv_cache), slot_mapping)


def _pages(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's view [blocks, Hkv, page, 2 D] of the layout LBNHC -> K and V pages [blocks, page, Hkv, D], both views."""
    blocks, heads, page, width = kv_cache.shape
    pages = kv_cache.permute(0, 2, 1, 3).view(blocks, 2, page, heads, width // 2)
    return pages[:, 0], pages[:, 1]
