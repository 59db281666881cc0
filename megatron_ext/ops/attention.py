"""Causal attention: one core, packed or paged keys. Legend: T tokens, B sequences, D head size."""

from __future__ import annotations

import torch

from megatron_ext.ops.backend import active_order, kernels
from megatron_ext.ops.checks import check, check_model_dtype
from megatron_ext.reduction_order import FRACTAL


def check_heads(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    check_model_dtype(op, q=q, k=k, v=v)
    check(op, k.shape == v.shape, f"k is {tuple(k.shape)}, v is {tuple(v.shape)}")
    check(op, q.shape[-1] == k.shape[-1], f"head size: q {q.shape[-1]}, k {k.shape[-1]}")
    check(op, q.shape[-1] % FRACTAL == 0, f"the head size must be a multiple of {FRACTAL}, found {q.shape[-1]}")
    check(op, q.shape[1] % k.shape[-2] == 0, f"{q.shape[1]} query heads are not a multiple of {k.shape[-2]} key heads")


def attention_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float) -> torch.Tensor:
    """q [T, Hq, D], k and v [T, Hkv, D], int32 cu_seqlens [B + 1] -> [T, Hq, D]. Differentiable."""
    check_heads("attention_varlen", q, k, v)
    order, cu_seqlens = active_order(), cu_seqlens.to(torch.int32)
    check("attention_varlen", int(cu_seqlens[-1]) == q.shape[0] == k.shape[0],
          f"cu_seqlens ends at {int(cu_seqlens[-1])}, q has {q.shape[0]} rows, k {k.shape[0]}")  # fmt: skip
    return kernels().attention_varlen(q, k, v, cu_seqlens, scale, order.kv_tile, order.mmad_order)


def attention_paged(q, k_cache, v_cache, block_tables, cu_query_lens, kv_lens, scale: float) -> torch.Tensor:
    """q [T, Hq, D], caches [blocks, page, Hkv, D], int32 block_tables [B, pages], cu_query_lens [B + 1], kv_lens [B] -> [T, Hq, D].

    The query rows of sequence b are the last of its kv_lens[b] positions: prefill, chunked prefill and decode alike.
    """
    check_heads("attention_paged", q, k_cache, v_cache)
    order, page = active_order(), k_cache.shape[1]
    check("attention_paged", order.kv_tile % page == 0, f"page size {page} does not divide the key tile {order.kv_tile}")
    tables, cu, lens = (x.to(torch.int32) for x in (block_tables, cu_query_lens, kv_lens))
    pages_needed = (int(lens.max()) + page - 1) // page if len(lens) else 0
    check("attention_paged", tables.shape[1] >= pages_needed, f"block_tables has {tables.shape[1]} pages, kv_lens need {pages_needed}")
    return kernels().attention_paged(q, k_cache, v_cache, tables, cu, lens, scale, order.kv_tile, order.mmad_order)


def write_kv_cache(k, v, k_cache, v_cache, slot_mapping: torch.Tensor) -> None:
    """Copies k, v [T, Hkv, D] to slot page * page_size + offset of the caches; negative slots are padding and are skipped."""
    check_model_dtype("write_kv_cache", k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    page = k_cache.shape[1]
    slots = slot_mapping.to(torch.int64)
    live = slots >= 0
    slots = slots[live]
    where = (slots // page, slots % page)
    k_cache[where] = k[: len(live)][live]
    v_cache[where] = v[: len(live)][live]
