"""Embedding gradient: rows are added in token order. Legend: T tokens, V vocabulary rows of this rank, H hidden."""

import torch


def embedding_wgrad_(grad_VH: torch.Tensor, ids_T: torch.Tensor, dy_TH: torch.Tensor) -> None:
    """fp32 accumulator, in place. A negative id belongs to another rank."""
    for token, row in zip(ids_T.tolist(), dy_TH.float(), strict=True):
        if token >= 0:
            grad_VH[token] += row
