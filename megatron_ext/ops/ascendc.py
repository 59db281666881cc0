"""The operators of `ascendc_kernels`, behind the same functions as `reference_kernels`: `--kernel-backend ascendc`."""

from __future__ import annotations

import torch

from ascendc_kernels.library import load
from megatron_ext.reduction_order import MMAD_ORDERS

__all__ = [
    "add_rms_norm", "apply_rope", "attention_paged", "attention_varlen", "beam_step", "combine", "combine_backward", "combine_rows",
    "dgrad", "dgrad_fp32", "discounted_returns", "embedding_wgrad_", "exp", "gae", "grouped_dgrad", "grouped_dgrad_fp32", "grouped_linear",
    "grouped_wgrad_", "linear", "linear_fp32", "load", "log", "log_softmax", "logprob_from_parts", "masked_mean", "masked_whiten",
    "ordered_sum", "permute", "rms_norm", "rms_norm_backward_", "route", "route_backward", "row_sum", "sample", "support_mask", "swiglu",
    "token_logprob", "unpermute", "vocab_dlogits", "vocab_exp_sum", "vocab_max", "wgrad_",
]  # fmt: skip

op = torch.ops.megatron_ext


# ---- contractions; an order goes to the kernel as its index in MMAD_ORDERS


def linear(x, w_NK, segments, mmad_order):
    return op.linear(x, w_NK, segments, MMAD_ORDERS.index(mmad_order))


def linear_fp32(x, w_NK, segments, mmad_order):
    return op.linear_fp32(x, w_NK, segments, MMAD_ORDERS.index(mmad_order))


def dgrad(dy, w_NK, segments, gated, mmad_order):
    return op.dgrad(dy, w_NK, segments, gated, MMAD_ORDERS.index(mmad_order))


def dgrad_fp32(dy, w_NK, segments, gated, mmad_order):
    return op.dgrad_fp32(dy, w_NK, segments, gated, MMAD_ORDERS.index(mmad_order))


def wgrad_(grad_NK, dy, x, boundaries, mmad_order):
    op.wgrad_(grad_NK, dy, x, boundaries, MMAD_ORDERS.index(mmad_order))


def grouped_linear(x_RK, w_ENK, counts_E, segments, mmad_order):
    return op.grouped_linear(x_RK, w_ENK, counts_E, segments, MMAD_ORDERS.index(mmad_order))


def grouped_dgrad(dy_RN, w_ENK, counts_E, segments, gated, mmad_order):
    return op.grouped_dgrad(dy_RN, w_ENK, counts_E, segments, gated, MMAD_ORDERS.index(mmad_order))


def grouped_dgrad_fp32(dy_RN, w_ENK, counts_E, segments, gated, mmad_order):
    return op.grouped_dgrad_fp32(dy_RN, w_ENK, counts_E, segments, gated, MMAD_ORDERS.index(mmad_order))


def grouped_wgrad_(grads_ENK, dy_RN, x_RK, counts_E, boundaries, mmad_order):
    op.grouped_wgrad_(grads_ENK, dy_RN, x_RK, counts_E, boundaries, MMAD_ORDERS.index(mmad_order))


def ordered_sum(parts, dtype):
    return op.ordered_sum(parts, dtype)


# ---- token copies


def permute(x_TH, token_ids_R):
    return op.permute(x_TH, token_ids_R)


def unpermute(rows_RH, index_R):
    return op.unpermute(rows_RH, index_R)


def combine(y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens, num_experts, segments, expert_range):
    return op.combine(y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens, num_experts, segments, *expert_range)


def combine_rows(y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens, num_experts, segments):
    return op.combine_rows(y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens, num_experts, segments)


def combine_backward(dout_TH, y_RH, weights_R, token_ids_R):
    return op.combine_backward(dout_TH, y_RH, weights_R, token_ids_R)


# ---- rows


def rms_norm(x, w_H, eps):
    return op.rms_norm(x, w_H, eps)


def add_rms_norm(x, residual, w_H, eps):
    return op.add_rms_norm(x, residual, w_H, eps)


def rms_norm_backward_(dw_H, dy, x, w_H, eps):
    return op.rms_norm_backward_(dw_H, dy, x, w_H, eps)


def swiglu(gate_up):
    return op.swiglu(gate_up)


def apply_rope(x, cos, sin):
    return op.apply_rope(x, cos, sin)


def embedding_wgrad_(grad_VH, ids, dy):
    op.embedding_wgrad_(grad_VH, ids, dy)


def exp(x):
    return op.exp(x)


def log(x):
    return op.log(x)


def row_sum(x):
    return op.row_sum(x)


# ---- attention


def attention_varlen(q, k, v, cu_seqlens, scale, kv_tile, mmad_order):
    return op.attention_varlen(q, k, v, cu_seqlens, scale, kv_tile, MMAD_ORDERS.index(mmad_order))[0]


def attention_paged(q, k_cache, v_cache, block_tables, cu_query_lens, kv_lens, scale, kv_tile, mmad_order):
    return op.attention_paged(q, k_cache, v_cache, block_tables, cu_query_lens, kv_lens, scale, kv_tile, MMAD_ORDERS.index(mmad_order))[0]


# ---- vocabulary


def vocab_max(logits_TV, valid, temperature):
    return op.vocab_max(logits_TV, valid, temperature)


def vocab_exp_sum(logits_TV, row_max_T, valid, segments, temperature):
    return op.vocab_exp_sum(logits_TV, row_max_T, valid, segments, temperature)


def logprob_from_parts(target_logit, row_max, exp_sum):
    return op.logprob_from_parts(target_logit, row_max, exp_sum)


def vocab_dlogits(logits_TV, row_max_T, exp_sum_T, targets_T, grad_T, valid, dtype, temperature):
    return op.vocab_dlogits(logits_TV, row_max_T, exp_sum_T, targets_T, grad_T, valid, dtype, temperature)


def token_logprob(logits_TV, ids_T, temperature, segments):
    return op.token_logprob(logits_TV, ids_T, temperature, segments)


def log_softmax(logits_TV, temperature, segments):
    return op.log_softmax(logits_TV, temperature, segments)


# ---- router


def route(*arguments):
    return op.route(*arguments)


def route_backward(*arguments):
    return op.route_backward(*arguments)


# ---- sampling


def sample(*arguments):
    return op.sample(*arguments)


def support_mask(logits_TV, last_T):
    return op.support_mask(logits_TV, last_T)


def beam_step(scores_BW, logprobs_BWV, kept):
    return op.beam_step(scores_BW, logprobs_BWV, kept)


# ---- advantages and returns


def gae(rewards_NL, values_NL, mask_NL, gamma, lam, bootstrap_N):
    return op.gae(rewards_NL, values_NL, mask_NL, gamma, lam, bootstrap_N)


def discounted_returns(rewards_NL, mask_NL, gamma, bootstrap_N):
    return op.discounted_returns(rewards_NL, mask_NL, gamma, bootstrap_N)


def masked_mean(x_NL, mask_NL):
    return op.masked_mean(x_NL, mask_NL)


def masked_whiten(x_NL, mask_NL, eps):
    return op.masked_whiten(x_NL, mask_NL, eps)
