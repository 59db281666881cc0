"""Inputs that reveal an order of addition. Small random numbers hide wrong orders; these do not."""

import torch


def revealing(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, large: float | None = None) -> torch.Tensor:
    """Normal numbers with one in eight replaced by +-large, so that cancellation depends on the order.

    large: 1e15 (1e4 in fp16) by default; smaller where several layers follow each other and nothing may overflow.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    large = large or (1e4 if dtype == torch.float16 else 1e15)
    where = torch.rand(*shape, generator=generator)
    return torch.where(where < 0.125, x.sign() * large, x).to(dtype)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def cancelling_rows(rows: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """1e20, 1, -1e20, 1 along k (3e4 in fp16): any other association gives another sum."""
    large = 3e4 if dtype == torch.float16 else 1e20
    return torch.tensor([large, 1.0, -large, 1.0]).repeat(k // 4).expand(rows, k).to(dtype).contiguous()
