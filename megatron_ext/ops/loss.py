"""Token-sum loss. Legend: T tokens, B sequences."""

from __future__ import annotations

import torch

from megatron_ext.ops.checks import check, check_float32
from megatron_ext.reference import loss


def token_sum(terms_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """fp32 [T], int32 [B + 1] -> fp32 scalar: each sequence by the row-sum order, sequences one after another. Not differentiable."""
    check_float32("token_sum", terms=terms_T)
    boundaries = cu_seqlens.tolist()
    check("token_sum", boundaries[-1] == terms_T.shape[0], f"cu_seqlens ends at {boundaries[-1]}, {terms_T.shape[0]} terms")
    return loss.token_sum(terms_T, boundaries)
