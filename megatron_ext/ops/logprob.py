"""Log-probabilities of the sampled distribution. Logits are fp32. Legend: T tokens, V vocabulary, Vl its part on this rank."""

from __future__ import annotations

import torch

from megatron_ext.ops.backend import active_order, kernels
from megatron_ext.ops.checks import check, check_float32
from megatron_ext.reduction_order import FRACTAL
from megatron_ext.reference import logprob


def vocab_max(logits_TV: torch.Tensor, valid: int) -> torch.Tensor:
    """fp32 [T, Vl] -> [T]: maximum of the first `valid` columns (exact); -inf if there are none."""
    check_float32("vocab_max", logits=logits_TV)
    return logprob.vocab_max(logits_TV, min(valid, logits_TV.shape[1]))


def vocab_exp_sum(logits_TV: torch.Tensor, row_max_T: torch.Tensor, valid: int, segments: int) -> torch.Tensor:
    """fp32 [T]: tree over `segments` equal pieces of exp(logit - max); columns >= valid are padding and add +0."""
    check_float32("vocab_exp_sum", logits=logits_TV, row_max=row_max_T)
    check("vocab_exp_sum", logits_TV.shape[1] % (FRACTAL * segments) == 0,
          f"{logits_TV.shape[1]} columns cannot be cut into {segments} segments of whole {FRACTAL}-element blocks")  # fmt: skip
    return kernels().vocab_exp_sum(logits_TV.contiguous(), row_max_T.contiguous(), valid, segments)


def logprob_from_parts(target_logit_T: torch.Tensor, row_max_T: torch.Tensor, exp_sum_T: torch.Tensor) -> torch.Tensor:
    """fp32 [T]: (logit - max) - log(sum), each rounded."""
    check_float32("logprob_from_parts", target_logit=target_logit_T, row_max=row_max_T, exp_sum=exp_sum_T)
    return kernels().logprob_from_parts(target_logit_T, row_max_T, exp_sum_T)


def vocab_dlogits(logits_TV, row_max_T, exp_sum_T, targets_T, grad_T, valid: int, dtype: torch.dtype) -> torch.Tensor:
    """[T, Vl] in the model dtype: grad * (onehot - softmax). targets_T holds local columns, -1 where the target lies elsewhere."""
    check_float32("vocab_dlogits", logits=logits_TV, row_max=row_max_T, exp_sum=exp_sum_T, grad=grad_T)
    return kernels().vocab_dlogits(logits_TV, row_max_T, exp_sum_T, targets_T, grad_T, valid, dtype)


def scale_logits(logits_TV: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    """fp32 division by the temperature (a number, or fp32 [T])."""
    check_float32("scale_logits", logits=logits_TV)
    if isinstance(temperature, torch.Tensor):
        return logits_TV / temperature.to(torch.float32)[:, None]
    return logits_TV / torch.tensor(temperature, dtype=torch.float32)


def whole_vocabulary(logits_TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(row maximum, exp sum) of unsharded logits, with the bits of the sharded path."""
    order, valid = active_order(), logits_TV.shape[1]
    padded = torch.nn.functional.pad(logits_TV, (0, order.padded_vocab(valid) - valid))
    row_max = vocab_max(padded, valid)
    return row_max, vocab_exp_sum(padded, row_max, valid, order.segments)


def log_softmax(logits_TV: torch.Tensor) -> torch.Tensor:
    """fp32 [T, V] -> fp32 [T, V], every entry with the bits of `token_logprob`."""
    row_max, exp_sum = whole_vocabulary(logits_TV)
    return kernels().logprob_from_parts(logits_TV, row_max[:, None], exp_sum[:, None])


def token_logprob(logits_TV: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    """fp32 [T, V], int64 [T] -> fp32 [T]."""
    row_max, exp_sum = whole_vocabulary(logits_TV)
    return logprob_from_parts(logits_TV.gather(1, ids_T[:, None])[:, 0], row_max, exp_sum)
