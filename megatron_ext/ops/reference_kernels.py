"""The executable specification behind the same functions as `ascendc`: `--kernel-backend reference`."""

from __future__ import annotations

import torch

from megatron_ext.reference import activation, norm, rope, sums
from megatron_ext.reference import attention as reference_attention
from megatron_ext.reference import embedding as reference_embedding
from megatron_ext.reference import linear as reference_linear
from megatron_ext.reference.elementary import exp, log
from megatron_ext.reference.linear import grouped_dgrad_fp32
from megatron_ext.reference.logprob import log_softmax, logprob_from_parts, token_logprob, vocab_exp_sum, vocab_max
from megatron_ext.reference.logprob import vocab_dlogits as reference_vocab_dlogits
from megatron_ext.reference.moe import combine, combine_backward, combine_rows, permute, unpermute
from megatron_ext.reference.returns import discounted_returns, gae, masked_mean, masked_whiten
from megatron_ext.reference.router import route, route_backward
from megatron_ext.reference.sampling import beam_step, sample, support_mask
from megatron_ext.reference.sums import row_sum

__all__ = [
    "add_rms_norm", "apply_rope", "attention_paged", "attention_varlen", "beam_step", "combine", "combine_backward", "combine_rows",
    "dgrad", "dgrad_fp32", "discounted_returns", "embedding_wgrad_", "exp", "gae", "grouped_dgrad", "grouped_dgrad_fp32", "grouped_linear",
    "grouped_wgrad_", "linear", "linear_fp32", "log", "log_softmax", "logprob_from_parts", "masked_mean", "masked_whiten", "ordered_sum",
    "permute", "rms_norm", "rms_norm_backward_", "route", "route_backward", "row_sum", "sample", "support_mask", "swiglu", "token_logprob",
    "unpermute", "vocab_dlogits", "vocab_exp_sum", "vocab_max", "wgrad_",
]  # fmt: skip


def rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


# ---- contractions


def linear_fp32(x, w_NK, segments, mmad_order):
    return reference_linear.linear_fp32(rows(x), w_NK, segments, mmad_order).view(*x.shape[:-1], w_NK.shape[0])


def linear(x, w_NK, segments, mmad_order):
    return linear_fp32(x, w_NK, segments, mmad_order).to(x.dtype)


def dgrad_fp32(dy, w_NK, segments, gated, mmad_order):
    return reference_linear.dgrad_fp32(rows(dy), w_NK, segments, gated, mmad_order).view(*dy.shape[:-1], w_NK.shape[1])


def dgrad(dy, w_NK, segments, gated, mmad_order):
    return dgrad_fp32(dy, w_NK, segments, gated, mmad_order).to(dy.dtype)


def wgrad_(grad_NK, dy, x, boundaries, mmad_order):
    grad_NK.copy_(reference_linear.wgrad(grad_NK, rows(dy), rows(x), boundaries, mmad_order))


def grouped_linear(x_RK, w_ENK, counts_E, segments, mmad_order):
    return reference_linear.grouped_linear_fp32(x_RK, w_ENK, counts_E, segments, mmad_order).to(x_RK.dtype)


def grouped_dgrad(dy_RN, w_ENK, counts_E, segments, gated, mmad_order):
    return grouped_dgrad_fp32(dy_RN, w_ENK, counts_E, segments, gated, mmad_order).to(dy_RN.dtype)


def grouped_wgrad_(grads_ENK, dy_RN, x_RK, counts_E, boundaries, mmad_order):
    results = reference_linear.grouped_wgrad(grads_ENK, dy_RN, x_RK, counts_E, boundaries.tolist(), mmad_order)
    for grad_NK, result_NK in zip(grads_ENK, results, strict=True):
        grad_NK.copy_(result_NK)


def ordered_sum(parts, dtype):
    total = sums.ordered_sum(parts)
    return total if dtype is None else total.to(dtype)


# ---- rows


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


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return activation.swiglu(gate_up)

    @staticmethod
    def backward(ctx, da):
        return activation.swiglu_backward(da, *ctx.saved_tensors)


swiglu = SwiGLU.apply


class ApplyRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ThD, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rope.apply_rope(x_ThD, cos, sin)

    @staticmethod
    def backward(ctx, dx_ThD):
        cos, sin = ctx.saved_tensors
        return rope.apply_rope(dx_ThD, cos, -sin), None, None


apply_rope = ApplyRope.apply


def embedding_wgrad_(grad_VH, ids, dy):
    reference_embedding.embedding_wgrad_(grad_VH, ids.reshape(-1), rows(dy))


# ---- vocabulary


def vocab_dlogits(logits_TV, row_max_T, exp_sum_T, targets_T, grad_T, valid, dtype, temperature):
    return reference_vocab_dlogits(logits_TV, row_max_T, exp_sum_T, targets_T, grad_T, valid, dtype, temperature=temperature)


# ---- attention


def sequence_keys(cache: torch.Tensor, start: int, length: int, block_table: torch.Tensor | None) -> torch.Tensor:
    """[length, heads, D] of one sequence, gathered from a packed tensor or through its block table."""
    if block_table is None:
        return cache[start : start + length]
    pages = (length + cache.shape[1] - 1) // cache.shape[1]
    return cache[block_table[:pages].long()].flatten(0, 1)[:length]


class AttentionVarlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, *settings):
        out, lse = attention(q, k, v, cu_seqlens, cu_seqlens.diff(), None, *settings)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        ctx.settings = settings
        return out

    @staticmethod
    def backward(ctx, d_out):
        q = ctx.saved_tensors[0]
        return *(grad.to(q.dtype) for grad in attention_backward(d_out, *ctx.saved_tensors, *ctx.settings)), *(None,) * 4


attention_varlen = AttentionVarlen.apply


def attention_paged(q, k_cache, v_cache, block_tables, cu_query_lens, kv_lens, *settings):
    return attention(q, k_cache, v_cache, cu_query_lens, kv_lens, block_tables, *settings)[0]


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
