"""A process that flushes subnormals computes other bits: refuse it."""

from __future__ import annotations

import torch

from megatron_ext.ops.backend import kernels


class PlatformError(RuntimeError):
    """This process or machine cannot keep the contract."""


def check_subnormals() -> None:
    """Raises PlatformError if torch or the kernels flush fp32 subnormals in this thread."""
    smallest = torch.tensor([2.0**-149])
    if (smallest * 2.0).view(torch.int32).item() != 2:
        raise PlatformError("torch flushes fp32 subnormals here (set_flush_denormal or a library set FTZ/DAZ); the contract keeps them")
    result = kernels().row_sum(torch.tensor([[2.0**-149, 2.0**-149]]))
    if result.view(torch.int32).item() != 2:
        raise PlatformError("the kernels of this process flush fp32 subnormals (FTZ/DAZ is set); the contract keeps them")
