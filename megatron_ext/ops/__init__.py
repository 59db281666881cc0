"""Operators: argument checks, then a kernel of the active backend, with autograd where training needs it.

Every op follows `reduction_order` and gives the bits of `reference/` on every backend. `configure` is called by `megatron_ext.enable`.
"""

from megatron_ext.ops.activation import swiglu
from megatron_ext.ops.attention import attention_paged, attention_varlen, write_kv_cache
from megatron_ext.ops.backend import NotConfigured, active_order, configure
from megatron_ext.ops.elementary import exp, log
from megatron_ext.ops.embedding import embedding_wgrad_
from megatron_ext.ops.grad_norm import largest_magnitude, norm_from_digits, square_digits
from megatron_ext.ops.linear import (
    dgrad,
    dgrad_fp32,
    grouped_dgrad,
    grouped_dgrad_fp32,
    grouped_linear,
    grouped_wgrad_,
    linear,
    linear_fp32,
    ordered_sum,
    wgrad_,
)
from megatron_ext.ops.logprob import (
    log_softmax,
    logprob_from_parts,
    scale_logits,
    token_logprob,
    vocab_dlogits,
    vocab_exp_sum,
    vocab_max,
)
from megatron_ext.ops.loss import PolicyObjective, policy_gradient_terms, policy_terms, token_sum
from megatron_ext.ops.moe import combine, combine_finish, combine_rows, permute, unpermute
from megatron_ext.ops.norm import add_rms_norm, rms_norm, rms_norm_backward_
from megatron_ext.ops.returns import discounted_returns, gae, masked_mean, masked_whiten
from megatron_ext.ops.rope import apply_rope, rope_tables
from megatron_ext.ops.router import route, router_dgrad, router_logits
from megatron_ext.ops.sampling import beam_step, sample, support_mask

__all__ = [
    "NotConfigured", "PolicyObjective", "active_order", "add_rms_norm", "apply_rope", "attention_paged", "attention_varlen", "beam_step",
    "combine", "combine_finish", "combine_rows", "configure", "dgrad", "dgrad_fp32", "discounted_returns", "embedding_wgrad_", "exp", "gae",
    "grouped_dgrad", "grouped_dgrad_fp32", "grouped_linear", "grouped_wgrad_", "largest_magnitude", "linear", "linear_fp32", "log",
    "log_softmax", "logprob_from_parts", "masked_mean", "masked_whiten", "norm_from_digits", "ordered_sum", "permute",
    "policy_gradient_terms", "policy_terms", "rms_norm", "rms_norm_backward_", "rope_tables", "route", "router_dgrad", "router_logits",
    "sample", "scale_logits", "square_digits", "support_mask", "swiglu", "token_logprob", "token_sum", "unpermute", "vocab_dlogits",
    "vocab_exp_sum", "vocab_max", "wgrad_", "write_kv_cache",
]  # fmt: skip
