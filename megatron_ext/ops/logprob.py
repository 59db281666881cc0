"""Log-probabilities of the sampled distribution. Logits are fp32. Legend: T tokens, V vocabulary, Vl its part on this rank.

A temperature is a number or fp32 [T]; it divides every logit, in fp32 and rounded, before anything else, without a scaled copy.
"""

from __future__ import annotations

import torch

from megatron_ext.ops.backend import active_order, kernels
from megatron_ext.ops.checks import check, check_float32
from megatron_ext.reduction_order import FRACTAL

Temperature = float | torch.Tensor | None


def temperatures(op: str, temperature: Temperature) -> torch.Tensor | None:
    """fp32 [T] or [1]; None where nothing is to be done: a division by 1 changes no bit. Raises ValueError unless positive and finite."""
    if temperature is None:
        return None
    values = torch.as_tensor(temperature, dtype=torch.float32).reshape(-1)
    if not ((values > 0) & values.isfinite()).all():
        raise ValueError(f"{op}: temperatures must be positive and finite, found {temperature}")
    return None if (values == 1).all() else values


def side_by_side(logits_TV: torch.Tensor) -> torch.Tensor:
    """The logits, copied only if the columns of a row are apart; rows may have any distance."""
    return logits_TV if logits_TV.stride(-1) == 1 else logits_TV.contiguous()


def vocab_max(logits_TV: torch.Tensor, valid: int, temperature: Temperature = None) -> torch.Tensor:
    """fp32 [T, Vl] -> [T]: maximum of the first `valid` columns (exact); -inf if there are none."""
    check_float32("vocab_max", logits=logits_TV)
    return kernels().vocab_max(side_by_side(logits_TV), min(valid, logits_TV.shape[1]), temperatures("vocab_max", temperature))


def vocab_exp_sum(
    logits_TV: torch.Tensor, row_max_T: torch.Tensor, valid: int, segments: int, temperature: Temperature = None
) -> torch.Tensor:
    """fp32 [T]: tree over `segments` equal pieces of exp(logit - max); columns >= valid are padding and add +0."""
    check_float32("vocab_exp_sum", logits=logits_TV, row_max=row_max_T)
    check("vocab_exp_sum", logits_TV.shape[1] % (FRACTAL * segments) == 0,
          f"{logits_TV.shape[1]} columns cannot be cut into {segments} segments of whole {FRACTAL}-element blocks")  # fmt: skip
    return kernels().vocab_exp_sum(side_by_side(logits_TV), row_max_T, valid, segments, temperatures("vocab_exp_sum", temperature))


def logprob_from_parts(target_logit_T: torch.Tensor, row_max_T: torch.Tensor, exp_sum_T: torch.Tensor) -> torch.Tensor:
    """fp32 [T]: (logit - max) - log(sum), each rounded."""
    check_float32("logprob_from_parts", target_logit=target_logit_T, row_max=row_max_T, exp_sum=exp_sum_T)
    return kernels().logprob_from_parts(target_logit_T, row_max_T, exp_sum_T)


def vocab_dlogits(logits_TV, row_max_T, exp_sum_T, targets_T, grad_T, valid: int, dtype: torch.dtype, temperature: Temperature = None) -> torch.Tensor:
    """[T, Vl] in the model dtype: grad * (onehot - softmax). targets_T holds local columns, -1 where the target lies elsewhere."""
    check_float32("vocab_dlogits", logits=logits_TV, row_max=row_max_T, exp_sum=exp_sum_T, grad=grad_T)
    values = temperatures("vocab_dlogits", temperature)
    return kernels().vocab_dlogits(side_by_side(logits_TV), row_max_T, exp_sum_T, targets_T, grad_T, valid, dtype, values)


def scale_logits(logits: torch.Tensor, temperature: Temperature) -> torch.Tensor:
    """fp32 [T] or [T, V], divided by the temperature."""
    check_float32("scale_logits", logits=logits)
    values = temperatures("scale_logits", temperature)
    return logits if values is None else logits / values.view(-1, *(1,) * (logits.dim() - 1))


def log_softmax(logits_TV: torch.Tensor, temperature: Temperature = None) -> torch.Tensor:
    """fp32 [T, V] -> fp32 [T, V], every entry with the bits of `token_logprob`, whole or sharded."""
    check_float32("log_softmax", logits=logits_TV)
    return kernels().log_softmax(side_by_side(logits_TV), temperatures("log_softmax", temperature), active_order().segments)


def token_logprob(logits_TV: torch.Tensor, ids_T: torch.Tensor, temperature: Temperature = None) -> torch.Tensor:
    """fp32 [T, V], int64 [T] -> fp32 [T]."""
    check_float32("token_logprob", logits=logits_TV)
    return kernels().token_logprob(side_by_side(logits_TV), ids_T, temperatures("token_logprob", temperature), active_order().segments)
