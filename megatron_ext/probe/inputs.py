"""Numbers whose sums depend on the order of addition."""

import torch


def revealing(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers, scaled by powers of ten from 1e-2 to 1e2."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 10.0 ** torch.randint(-2, 3, shape, generator=generator)).to(dtype)
