"""Log-probabilities over a vocabulary cut into segments. Logits are fp32. Legend: T tokens, V vocabulary columns of this rank.

A temperature, positive and finite, is fp32 [T] or one value [1]; it divides every logit, and the quotient is rounded, before anything else.
`exp` and `log` may be given as faster functions of equal bits.
"""

import torch

from megatron_ext.reference.elementary import exp, log
from megatron_ext.reference.sums import ordered_sum, pad_last, row_sum
from megatron_ext.reduction_order import FRACTAL


def scale_logits(logits_TV: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    return logits_TV if temperature is None else logits_TV / temperature.view(-1, 1)


def vocab_max(logits_TV: torch.Tensor, valid: int, temperature: torch.Tensor | None = None) -> torch.Tensor:
    """+ 0.0 turns a maximum of -0 into +0: max(-0, +0) may be either, by CPU and by rank."""
    if valid <= 0:
        return torch.full((logits_TV.shape[0],), float("-inf"))
    return scale_logits(logits_TV, temperature)[:, :valid].amax(dim=1) + 0.0


def vocab_exp_sum(
    logits_TV: torch.Tensor, row_max_T: torch.Tensor, valid: int, segments: int, temperature: torch.Tensor | None = None
) -> torch.Tensor:
    """Tree over `segments` equal pieces; padded columns (>= valid) add +0."""
    logits_TV = scale_logits(logits_TV, temperature)
    real = torch.arange(logits_TV.shape[1])[None, :] < valid
    e = torch.where(real, exp(torch.where(real, logits_TV - row_max_T[:, None], 0.0)), 0.0)
    return ordered_sum(torch.stack([row_sum(piece) for piece in e.chunk(segments, dim=1)]))


def logprob_from_parts(target_logit_T: torch.Tensor, row_max_T: torch.Tensor, exp_sum_T: torch.Tensor, log=log) -> torch.Tensor:
    return (target_logit_T - row_max_T) - log(exp_sum_T)


def vocab_dlogits(logits_TV, row_max_T, exp_sum_T, targets_T, grad_T, valid, dtype, exp=exp, temperature=None):
    """grad * (onehot - softmax), rounded to the model dtype. targets_T is -1 where the target lies on another rank.

    The gradient of logits before a temperature: grad / temperature, rounded, stands for grad (one division a row).
    """
    if temperature is not None:
        logits_TV, grad_T = scale_logits(logits_TV, temperature), grad_T / temperature
    columns = torch.arange(logits_TV.shape[1])[None, :]
    probability = exp(logits_TV - row_max_T[:, None]) / exp_sum_T[:, None]
    onehot = (columns == targets_T[:, None]).float()
    return torch.where(columns < valid, grad_T[:, None] * (onehot - probability), 0.0).to(dtype)


def vocab_parts(logits_TV, temperature: torch.Tensor | None, segments: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(row maximum, exp sum) of a whole vocabulary, with the bits of one that is padded and cut over ranks."""
    valid = logits_TV.shape[1]
    padded = pad_last(logits_TV, FRACTAL * segments)
    row_max = vocab_max(padded, valid, temperature)
    return row_max, vocab_exp_sum(padded, row_max, valid, segments, temperature)


def log_softmax(logits_TV: torch.Tensor, temperature: torch.Tensor | None, segments: int) -> torch.Tensor:
    """Every entry has the bits of `token_logprob`."""
    row_max, exp_sum = vocab_parts(logits_TV, temperature, segments)
    return logprob_from_parts(scale_logits(logits_TV, temperature), row_max[:, None], exp_sum[:, None])


def token_logprob(logits_TV, ids_T, temperature: torch.Tensor | None, segments: int) -> torch.Tensor:
    """ids_T: int64, in [0, V)."""
    row_max, exp_sum = vocab_parts(logits_TV, temperature, segments)
    return logprob_from_parts(scale_logits(logits_TV.gather(1, ids_T[:, None]), temperature)[:, 0], row_max, exp_sum)
