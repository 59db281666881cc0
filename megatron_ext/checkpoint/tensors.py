"""What every kind of checkpoint looks like to the tools: named logical tensors, read by ranges of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_ext import weight_digest as digest

SLAB_BYTES = 64 << 20  # rows are read in pieces of about this size


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, incomplete or not of the expected model; names file and tensor."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of a logical tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.shape)}"


class LogicalTensors(Protocol):
    """An open checkpoint."""

    specs: Mapping[str, TensorSpec]

    def slabs(self, name: str) -> Iterator[tuple[int, int]]:
        """Ranges of rows that together make the tensor and are each read at no more cost than its bytes."""
        ...

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a tensor. Raises CheckpointError."""
        ...


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def row_slabs(spec: TensorSpec, limit: int = SLAB_BYTES) -> Iterator[tuple[int, int]]:
    """Ranges of rows of at most about `limit` bytes."""
    rows = spec.shape[0]
    step = max(1, limit * rows // max(1, spec.nbytes))
    yield from ((start, min(start + step, rows)) for start in range(0, rows, step))


class Cast:
    """Another checkpoint's tensors, as `dtype`. Reading raises CheckpointError for a number that is infinite only after the cast."""

    def __init__(self, source: LogicalTensors, dtype: torch.dtype) -> None:
        self._source, self._dtype = source, dtype
        self.specs = {name: TensorSpec(spec.shape, dtype) for name, spec in source.specs.items()}
        self.slabs = source.slabs

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        kept = self._source.read(name, start, stop)
        cast = kept.to(self._dtype)
        lost = int((cast.isinf() & ~kept.isinf()).sum())
        if lost:
            raise CheckpointError(f"{name}: {lost} values are too large for {dtype_name(self._dtype)}; keep the type, or choose another")
        return cast


class Part:
    """Some of another checkpoint's tensors, in the given order."""

    def __init__(self, source: LogicalTensors, names: list[str]) -> None:
        self.specs = {name: source.specs[name] for name in names}
        self.slabs, self.read = source.slabs, source.read


def stream(source: LogicalTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in order, slab by slab."""
    for name in source.specs:
        for start, stop in source.slabs(name):
            yield name, source.read(name, start, stop)


def digests(source: LogicalTensors, on_bytes=lambda count: None) -> dict[str, str]:
    """Digest of every logical tensor, as a running engine reports it (weight_digest). on_bytes: called with what was read."""
    found = {}
    for name, spec in source.specs.items():
        regions, rest = [], (0,) * (len(spec.shape) - 1)
        for start, stop in source.slabs(name):
            slab = source.read(name, start, stop)
            regions.append(digest.region(slab, spec.shape, (start, *rest)))
            on_bytes(slab.nbytes)
        found[name] = digest.merge_regions(name, regions)
    return found
