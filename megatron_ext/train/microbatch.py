"""Where the rows of the current micro-batch belong: the sequence and the place in it, whatever the tensor layout.

Megatron carries activations as [s, b, ...]; packed sequences as [T, 1, ...]. Rows are numbered here in sequence-major
order, which is the order in which gradients are accumulated. Legend: s positions, b sequences (1 when packed), R = s x b rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class RowLayout:
    """Shape and sequence boundaries of one micro-batch.

    positions_R: int64, position of every row in its own sequence. cu_seqlens: int32 [sequences + 1] over all R rows; rows
    that only pad the micro-batch form sequences of their own at the end, so that they cannot touch the others.
    """

    seq: int
    batch: int
    positions_R: torch.Tensor
    cu_seqlens: torch.Tensor

    @classmethod
    def padded(cls, seq: int, batch: int) -> RowLayout:
        """`batch` sequences of `seq` rows each."""
        return cls(
            seq=seq,
            batch=batch,
            positions_R=torch.arange(seq).repeat(batch),
            cu_seqlens=torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32),
        )

    @classmethod
    def packed(cls, lengths: list[int], multiple_of: int = 1) -> RowLayout:
        """Sequences one after another, then padding up to a multiple of `multiple_of` rows."""
        padding = -sum(lengths) % multiple_of
        lengths = [*lengths, padding] if padding else lengths
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return cls(
            seq=int(ends[-1]),
            batch=1,
            positions_R=torch.cat([torch.arange(length) for length in lengths]),
            cu_seqlens=ends.to(torch.int32),
        )

    def rows(self, x_SB: torch.Tensor) -> torch.Tensor:
        """[s, b, ...] -> [R, ...]."""
        self._check(x_SB.shape[:2])
        return x_SB[:, 0] if self.batch == 1 else x_SB.transpose(0, 1).flatten(0, 1)

    def unrows(self, x_R: torch.Tensor) -> torch.Tensor:
        """[R, ...] -> [s, b, ...]."""
        return x_R.unflatten(0, (self.batch, self.seq)).transpose(0, 1)

    def row_ids(self, first: int, count: int) -> torch.Tensor:
        """int64 [count x b]: row numbers of the slice [first, first + count) of the s dimension, in [s, b] order."""
        s = torch.arange(first, first + count)[:, None]
        return (s + self.seq * torch.arange(self.batch)[None, :]).flatten()

    def sequence_ids(self) -> torch.Tensor:
        """int64 [R]: number of the sequence that each row belongs to."""
        return torch.repeat_interleave(self.cu_seqlens.long().diff())

    def _check(self, shape: torch.Size) -> None:
        if tuple(shape) != (self.seq, self.batch):
            raise ValueError(
                f"activation of shape {tuple(shape)} (s, b) in a micro-batch of ({self.seq}, {self.batch}); "
                "the forward step must run inside `microbatch.active` of the same batch"
            )


_active: list[RowLayout] = []


@contextlib.contextmanager
def active(layout: RowLayout) -> Iterator[RowLayout]:
    """Makes `layout` the current one for the forward pass of one micro-batch. Backward passes use what forward saved."""
    _active.append(layout)
    try:
        yield layout
    finally:
        _active.pop()


def current() -> RowLayout:
    """The layout of the micro-batch whose forward pass runs. Raises RuntimeError outside of one."""
    if not _active:
        raise RuntimeError("no active micro-batch; run the model's forward inside `microbatch.active(layout)`")
    return _active[-1]
