"""The executable specification behind the same functions as `ascendc`: `--kernel-backend reference`."""

from __future__ import annotations

import torch

from megatron_ext.reference import attention as reference_attention
from megatron_ext.reference import linear, norm, sums
from megatron_ext.reference.activation import swiglu, swiglu_backward
from megatron_ext.reference.elementary import exp, log
from megatron_ext.reference.embedding import embedding_wgrad_
from megatron_ext.reference.linear import dgrad_fp32, linear_fp32
from megatron_ext.reference.logprob import logprob_from_parts, vocab_dlogits, vocab_exp_sum
from megatron_ext.reference.moe import combine
from megatron_ext.reference.router import route, route_backward
from megatron_ext.reference.sums import row_sum

__all__ = [
    "add_rms_norm", "attention", "attention_backward", "combine", "dgrad_fp32", "embedding_wgrad_", "exp", "linear_fp32", "log", "logprob_from_parts", "ordered_sum", "rms_norm",
    "rms_norm_backward_", "route", "route_backward", "row_sum", "swiglu", "swiglu_backward", "vocab_dlogits", "vocab_exp_sum", "wgrad_",
]  # fmt: skip


def rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def ordered_sum(parts, dtype):
    total = sums.ordered_sum(parts)
    return total if dtype is None else total.to(dtype)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_H, eps):
        ctx.save_for_backward(x, w_H)
        ctx.eps = eps
        return norm.rms_norm(rows(x), w_H, eps).view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        x, w_H = ctx.saved_tensors
        dw = torch.zeros(w_H.shape)
        dx = rms_norm_backward_(dw, dy, x, w_H, ctx.eps)
        return dx, dw.to(w_H.dtype), None


def rms_norm(x, w_H, eps):
    return RMSNorm.apply(x, w_H, eps)


def add_rms_norm(x, residual, w_H, eps):
    total = x + residual
    return rms_norm(total, w_H, eps), total


def rms_norm_backward_(dw_H, dy, x, w_H, eps):
    return norm.rms_norm_backward_(dw_H, rows(dy), rows(x), w_H, eps).view(x.shape)


def wgrad_(grad_NK, dy_MN, x_MK, boundaries, mmad_order):
    grad_NK.copy_(linear.wgrad(grad_NK, dy_MN, x_MK, boundaries, mmad_order))


def sequence_keys(cache: torch.Tensor, start: int, length: int, block_table: torch.Tensor | None) -> torch.Tensor:
    """[length, heads, D] of one sequence, gathered from a packed tensor or through its block table."""
    if block_table is None:
        return cache[start : start + length]
    pages = (length + cache.shape[1] - 1) // cache.shape[1]
    return cache[block_table[:pages].long()].flatten(0, 1)[:length]


def attention(q, k, v, cu_queries, kv_lens, block_tables, scale, kv_tile, mmad_order):
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    group = q.shape[1] // k.shape[-2]
    cu = cu_queries.tolist()
    for b, length in enumerate(kv_lens.tolist()):
        rows = slice(cu[b], cu[b + 1])
        keys, values = (sequence_keys(x, cu[b], length, None if block_tables is None else block_tables[b]) for x in (k, v))
        for head in range(q.shape[1]):
            kv = head // group
            first_position = length - (cu[b + 1] - cu[b])
            out[rows, head], lse[rows, head] = reference_attention.attention(
                q[rows, head], keys[:, kv], values[:, kv], first_position, scale, kv_tile, mmad_order
            )
    return out, lse


def attention_backward(do, q, k, v, o, lse, cu_seqlens, scale, kv_tile, mmad_order):
    dq, dk, dv = torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)
    group, cu = q.shape[1] // k.shape[1], cu_seqlens.tolist()
    for start, end in zip(cu[:-1], cu[1:], strict=True):
        rows = slice(start, end)
        for head in range(q.shape[1]):
            kv = head // group
            parts = reference_attention.attention_backward(
                do[rows, head], q[rows, head], k[rows, kv], v[rows, kv], o[rows, head], lse[rows, head], scale, kv_tile, mmad_order
            )
            dq[rows, head] = parts[0]
            dk[rows, kv] = dk[rows, kv] + parts[1]
            dv[rows, kv] = dv[rows, kv] + parts[2]
    return dq, dk, dv
