"""Softmax over the last dimension with a scale and a mask, as in attention. Legend: X leading dimensions, Q queries, K keys.

The scale multiplies in fp32 and the product is rounded; sums run in blocks of 64 (row_sum); the result is rounded once, to the dtype of x.
A masked lane never enters the maximum, adds +0 to the sum, and is +0 in the result, whatever the row holds.
"""

import torch

from megatron_ext.reference.elementary import exp
from megatron_ext.reference.sums import row_sum


def masked_lanes(x_XQK: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """bool [X, Q, K], True = masked out. causal: the last query sees every key, each one before it one key less."""
    masked = torch.zeros(x_XQK.shape, dtype=torch.bool)
    if mask is not None:
        masked = masked | mask
    if causal:
        queries, keys = x_XQK.shape[-2:]
        masked = masked | (torch.arange(keys)[None, :] > torch.arange(queries)[:, None] + (keys - queries))
    return masked


def masked_softmax(x_XQK: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool = False) -> torch.Tensor:
    """mask: bool, broadcastable to x. A row without an unmasked lane is +0."""
    masked = masked_lanes(x_XQK, mask, causal)
    scaled = x_XQK.float() * torch.tensor(scale, dtype=torch.float32)
    row_max = torch.where(masked, float("-inf"), scaled).amax(-1, keepdim=True)
    e = torch.where(masked, 0.0, exp(scaled - row_max))
    return torch.where(masked, 0.0, e / row_sum(e)[..., None]).to(x_XQK.dtype)


def masked_softmax_backward(dp_XQK: torch.Tensor, p_XQK: torch.Tensor, scale: float) -> torch.Tensor:
    """dx = (p * (dp - sum(p * dp))) * scale, each operation rounded; p is the rounded result of the forward pass.

    Lanes where p is 0, which masked ones are, add +0 to the sum and have a gradient of +0, whatever dp holds there.
    """
    p, dp = p_XQK.float(), dp_XQK.float()
    dot = row_sum(torch.where(p == 0, 0.0, p * dp))[..., None]
    return torch.where(p == 0, 0.0, p * (dp - dot) * torch.tensor(scale, dtype=torch.float32)).to(p_XQK.dtype)
