"""Bitwise comparison. Equal means equal bytes; a difference is named by its first index and both values."""

from __future__ import annotations

import torch

INTEGER_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BitsDiffer(AssertionError):
    """Two tensors that must be equal bit for bit are not."""


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """Integer view of equal width."""
    return x.detach().contiguous().view(INTEGER_VIEWS[x.element_size()])


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bool mask of the elements whose bits differ."""
    return as_bits(a) != as_bits(b)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensor") -> None:
    """Raises BitsDiffer with the first differing index and both values."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise BitsDiffer(f"{what}: {actual.dtype}{tuple(actual.shape)} instead of {expected.dtype}{tuple(expected.shape)}")
    mask = differing(actual, expected)
    if not mask.any():
        return
    first = tuple(mask.nonzero()[0].tolist())
    values = f"{actual[first].item()!r} (bits {as_bits(actual)[first].item():#x}), expected {expected[first].item()!r} (bits {as_bits(expected)[first].item():#x})"
    raise BitsDiffer(f"{what}: {int(mask.sum())} of {mask.numel()} elements differ in bits, the first at {list(first)}: {values}")
