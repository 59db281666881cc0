"""Advantages and returns of sequences, masked mean and whitening. All fp32. Legend: N sequences, L tokens of a sequence.

mask_NL is bool. A token that it leaves out is stepped over: what it holds does not matter, and its result is +0. gamma and lam lie in [0, 1].
Not differentiable.
"""

from __future__ import annotations

import torch

from megatron_ext.ops.backend import kernels
from megatron_ext.ops.checks import check, check_float32


def gae(
    rewards_NL: torch.Tensor, values_NL: torch.Tensor, mask_NL: torch.Tensor, gamma: float, lam: float, bootstrap_N: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) [N, L] by generalized advantage estimation (arXiv:1506.02438).

    bootstrap_N: the value behind the last token, +0 by default.
    """
    _check_sequences("gae", mask_NL, rewards=rewards_NL, values=values_NL)
    _check_scan("gae", len(mask_NL), bootstrap_N, gamma=gamma, lam=lam)
    return kernels().gae(rewards_NL, values_NL, mask_NL, gamma, lam, bootstrap_N)


def discounted_returns(rewards_NL: torch.Tensor, mask_NL: torch.Tensor, gamma: float, bootstrap_N: torch.Tensor | None = None) -> torch.Tensor:
    """[N, L]: R[t] = r[t] + gamma * R[t + 1]. bootstrap_N: R behind the last token, +0 by default."""
    _check_sequences("discounted_returns", mask_NL, rewards=rewards_NL)
    _check_scan("discounted_returns", len(mask_NL), bootstrap_N, gamma=gamma)
    return kernels().discounted_returns(rewards_NL, mask_NL, gamma, bootstrap_N)


def masked_mean(x_NL: torch.Tensor, mask_NL: torch.Tensor) -> torch.Tensor:
    """Scalar: each sequence by the row-sum order, sequences one after another. Raises ValueError without tokens."""
    _check_sequences("masked_mean", mask_NL, x=x_NL)
    _check_count("masked_mean", mask_NL, 1)
    return kernels().masked_mean(x_NL, mask_NL)


def masked_whiten(x_NL: torch.Tensor, mask_NL: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """[N, L]: (x - mean) / sqrt(variance + eps), the variance that of a sample. Raises ValueError for less than two tokens."""
    _check_sequences("masked_whiten", mask_NL, x=x_NL)
    check("masked_whiten", eps >= 0, f"eps must be at least 0, found {eps}")
    _check_count("masked_whiten", mask_NL, 2)
    return kernels().masked_whiten(x_NL, mask_NL, eps)


def _check_sequences(op: str, mask_NL: torch.Tensor, **tensors: torch.Tensor) -> None:
    check_float32(op, **tensors)
    check(op, mask_NL.dim() == 2 and mask_NL.dtype == torch.bool, f"mask must be bool [N, L], found {mask_NL.dtype} {list(mask_NL.shape)}")
    for name, tensor in tensors.items():
        check(op, tensor.shape == mask_NL.shape, f"{name} has shape {list(tensor.shape)}, mask has shape {list(mask_NL.shape)}")


def _check_scan(op: str, sequences: int, bootstrap_N: torch.Tensor | None, **factors: float) -> None:
    for name, factor in factors.items():
        check(op, 0 <= factor <= 1, f"{name} must be 0 to 1, found {factor}")
    if bootstrap_N is not None:
        check_float32(op, bootstrap=bootstrap_N)
        check(op, bootstrap_N.shape == (sequences,), f"bootstrap must have shape [{sequences}], found {list(bootstrap_N.shape)}")


def _check_count(op: str, mask_NL: torch.Tensor, least: int) -> None:
    count = int(mask_NL.sum())
    check(op, count >= least, f"at least {least} tokens are needed, the mask keeps {count}")
