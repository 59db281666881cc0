"""Token-sum loss: the per-token terms of a sequence by row_sum, sequences one after another; scaled once, after accumulation."""

import torch

from megatron_ext.reference.sums import row_sum


def token_sum(terms_T: torch.Tensor, boundaries: list[int]) -> torch.Tensor:
    """fp32 scalar."""
    total = torch.zeros(())
    for start, end in zip(boundaries[:-1], boundaries[1:], strict=True):
        total = total + row_sum(terms_T[start:end])
    return total
