"""Log-probabilities over a vocabulary cut into segments. Logits are fp32. Legend: T tokens, V vocabulary columns of this rank.

`exp` and `log` may be given as faster functions of equal bits.
"""

import torch

from megatron_ext.reference.elementary import exp, log
from megatron_ext.reference.sums import ordered_sum, row_sum


def vocab_max(logits_TV: torch.Tensor, valid: int) -> torch.Tensor:
    """+ 0.0 turns a maximum of -0 into +0: max(-0, +0) may be either, by CPU and by rank."""
    if valid <= 0:
        return torch.full((logits_TV.shape[0],), float("-inf"))
    return logits_TV[:, :valid].amax(dim=1) + 0.0


def vocab_exp_sum(logits_TV: torch.Tensor, row_max_T: torch.Tensor, valid: int, segments: int) -> torch.Tensor:
    """Tree over `segments` equal pieces; padded columns (>= valid) add +0."""
    real = torch.arange(logits_TV.shape[1])[None, :] < valid
    e = torch.where(real, exp(torch.where(real, logits_TV - row_max_T[:, None], 0.0)), 0.0)
    return ordered_sum(torch.stack([row_sum(piece) for piece in e.chunk(segments, dim=1)]))


def logprob_from_parts(target_logit_T: torch.Tensor, row_max_T: torch.Tensor, exp_sum_T: torch.Tensor, log=log) -> torch.Tensor:
    return (target_logit_T - row_max_T) - log(exp_sum_T)


def vocab_dlogits(logits_TV, row_max_T, exp_sum_T, targets_T, grad_T, valid, dtype, exp=exp):
    """grad * (onehot - softmax), rounded to the model dtype. targets_T is -1 where the target lies on another rank."""
    columns = torch.arange(logits_TV.shape[1])[None, :]
    probability = exp(logits_TV - row_max_T[:, None]) / exp_sum_T[:, None]
    onehot = (columns == targets_T[:, None]).float()
    return torch.where(columns < valid, grad_T[:, None] * (onehot - probability), 0.0).to(dtype)
