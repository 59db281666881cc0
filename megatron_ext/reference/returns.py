"""Advantages and returns of sequences, and the masked mean and whitening that go with them. All fp32. Legend: N sequences, L tokens of a sequence.

Scans run from the last token of a sequence to its first, one after another, each operation rounded by itself. A token that the mask leaves out is
stepped over: the scan goes on behind it as if it were not there, and its result is +0. So neither padding nor the other sequences matter.
gamma and lam are rounded to fp32 first, then their product is.
"""

import torch

from megatron_ext.reference.elementary import sqrt
from megatron_ext.reference.sums import row_sum


def discounted_returns(rewards_NL, mask_NL, gamma: float, bootstrap_N: torch.Tensor | None = None) -> torch.Tensor:
    """R[t] = r[t] + gamma * R[t + 1]. bootstrap_N: R behind the last token, +0 by default."""
    gamma = torch.tensor(gamma, dtype=torch.float32)
    running_N = torch.zeros(len(rewards_NL)) if bootstrap_N is None else bootstrap_N
    returns_NL = torch.zeros_like(rewards_NL)
    for t in reversed(range(rewards_NL.shape[1])):
        running_N = torch.where(mask_NL[:, t], rewards_NL[:, t] + gamma * running_N, running_N)
        returns_NL[:, t] = torch.where(mask_NL[:, t], running_N, 0.0)
    return returns_NL


def gae(rewards_NL, values_NL, mask_NL, gamma: float, lam: float, bootstrap_N: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) by generalized advantage estimation (arXiv:1506.02438).

    A[t] = ((r[t] + gamma * v[t + 1]) - v[t]) + (gamma * lam) * A[t + 1], return[t] = A[t] + v[t].
    bootstrap_N: the value behind the last token, +0 by default; A is +0 there.
    """
    gamma = torch.tensor(gamma, dtype=torch.float32)
    decay = gamma * torch.tensor(lam, dtype=torch.float32)
    next_value_N = torch.zeros(len(rewards_NL)) if bootstrap_N is None else bootstrap_N
    advantage_N = torch.zeros(len(rewards_NL))
    advantages_NL, returns_NL = torch.zeros_like(rewards_NL), torch.zeros_like(rewards_NL)
    for t in reversed(range(rewards_NL.shape[1])):
        kept_N, value_N = mask_NL[:, t], values_NL[:, t]
        delta_N = (rewards_NL[:, t] + gamma * next_value_N) - value_N
        advantage_N = torch.where(kept_N, delta_N + decay * advantage_N, advantage_N)
        next_value_N = torch.where(kept_N, value_N, next_value_N)
        advantages_NL[:, t] = torch.where(kept_N, advantage_N, 0.0)
        returns_NL[:, t] = torch.where(kept_N, advantage_N + value_N, 0.0)
    return advantages_NL, returns_NL


def masked_sum(x_NL: torch.Tensor, mask_NL: torch.Tensor) -> torch.Tensor:
    """fp32 scalar: row_sum of every sequence, anchored at its first column, then sequences one after another. A token left out adds +0."""
    total = torch.zeros(())
    for sequence_sum in row_sum(torch.where(mask_NL, x_NL, 0.0)):
        total = total + sequence_sum
    return total


def masked_mean(x_NL: torch.Tensor, mask_NL: torch.Tensor) -> torch.Tensor:
    """fp32 scalar: NaN without tokens."""
    return masked_sum(x_NL, mask_NL) / mask_NL.sum().float()


def masked_whiten(x_NL: torch.Tensor, mask_NL: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps), the variance that of a sample (n - 1 tokens); +0 where the mask leaves a token out."""
    mean = masked_mean(x_NL, mask_NL)
    centred_NL = x_NL - mean
    variance = masked_sum(centred_NL * centred_NL, mask_NL) / (mask_NL.sum() - 1).float()
    deviation = sqrt(variance + torch.tensor(eps, dtype=torch.float32))
    return torch.where(mask_NL, centred_NL / deviation, 0.0)
