"""How a parallel layout cuts Megatron's tensors into chunks, and which rank writes each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ext.checkpoint.mapping import MegatronTensor, ModelShape


class LayoutError(ValueError):
    """A layout that does not divide the model."""


@dataclass(frozen=True)
class MegatronLayout:
    """Parallel sizes. They cut files and chunks; any other layout can load them, reading parts of chunks.

    etp: expert tensor parallel size; None means 1 when ep > 1, else tp (Megatron's own default).
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None

    @property
    def expert_tensor_parallel(self) -> int:
        return self.etp or (1 if self.ep > 1 else self.tp)

    @property
    def ranks_per_stage(self) -> int:
        return math.lcm(self.tp, self.ep * self.expert_tensor_parallel)

    @property
    def ranks(self) -> int:
        """The fewest that hold the model."""
        return self.pp * self.ranks_per_stage

    def check(self, shape: ModelShape, padded_vocab: int) -> None:
        """Raises LayoutError naming every size that a parallel size does not divide."""
        etp = self.expert_tensor_parallel
        cuts = [
            ("pp", self.pp, "layers", shape.layers), ("tp", self.tp, "query heads", shape.heads), ("tp", self.tp, "padded vocabulary", padded_vocab),
            ("tp", self.tp, "rows of linear_qkv", (shape.heads + 2 * shape.groups) * shape.head_dim),
        ]  # fmt: skip
        cuts += [("tp", self.tp, "MLP width", shape.dense_width)] if not all(shape.experts_in) else []
        if shape.experts:
            cuts += [("ep", self.ep, "experts", shape.experts), ("etp", etp, "expert width", shape.expert_width)]
        elif self.ep > 1:
            raise LayoutError(f"ep = {self.ep}: the model has no experts")
        problems = [f"{name} = {size} does not divide {what} = {number}" for name, size, what, number in cuts if size < 1 or number % size]
        if problems:
            raise LayoutError("; ".join(problems))

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "PP": self.pp, "EP": self.ep, "ETP": self.expert_tensor_parallel}
        return "x".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "TP1"


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a Megatron tensor that one rank writes."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def chunks(tensor: MegatronTensor, layout: MegatronLayout, layers: int, item_bytes: int, limit: int) -> Iterator[Chunk]:
    """A tensor's chunks under a layout, none much larger than `limit` bytes, so that nobody has to hold more at once."""
    for chunk in _by_rank(tensor, layout, layers):
        yield from _limited(chunk, max(1, limit // item_bytes))


def _by_rank(tensor: MegatronTensor, layout: MegatronLayout, layers: int) -> Iterator[Chunk]:
    first = _stage(tensor, layout, layers) * layout.ranks_per_stage
    if not tensor.per_expert:
        for rank, offset, size in _cuts(tensor, layout.tp):
            yield _chunk(tensor, first + rank, (), offset, size)
        return
    etp, per_rank = layout.expert_tensor_parallel, tensor.shape[0] // layout.ep
    for expert in range(tensor.shape[0]):
        for rank, offset, size in _cuts(tensor, etp):
            yield _chunk(tensor, first + expert // per_rank * etp + rank, (expert,), offset, size)


def _stage(tensor: MegatronTensor, layout: MegatronLayout, layers: int) -> int:
    if tensor.layer is not None:
        return tensor.layer // (layers // layout.pp)
    return layout.pp - 1 if tensor.last else 0


def _cuts(tensor: MegatronTensor, ranks: int) -> Iterator[tuple[int, int, int]]:
    """(rank, offset, size) along the cut dimension; rank 0 alone writes what is replicated."""
    if tensor.cut is None:
        yield 0, 0, tensor.shape[-1]
        return
    halves = 2 if tensor.gated else 1
    half = tensor.shape[tensor.cut] // halves
    for index in range(halves):
        yield from ((rank, index * half + rank * (half // ranks), half // ranks) for rank in range(ranks))


def _chunk(tensor: MegatronTensor, rank: int, lead: tuple[int, ...], offset: int, size: int) -> Chunk:
    offsets = [*lead, *(0,) * (len(tensor.shape) - len(lead))]
    sizes = [*(1,) * len(lead), *tensor.shape[len(lead) :]]
    if tensor.cut is not None:
        offsets[tensor.cut], sizes[tensor.cut] = offset, size
    return Chunk(rank, tuple(offsets), tuple(sizes))


def _limited(chunk: Chunk, elements: int) -> Iterator[Chunk]:
    """Pieces of rows."""
    if math.prod(chunk.sizes) <= elements or len(chunk.sizes) == 1:
        yield chunk
        return
    row = len(chunk.sizes) - 2
    start, rows = chunk.offsets[row], chunk.sizes[row]
    step = max(1, elements // chunk.sizes[-1])
    for at in range(0, rows, step):
        offsets, sizes = list(chunk.offsets), list(chunk.sizes)
        offsets[row], sizes[row] = start + at, min(step, rows - at)
        yield Chunk(chunk.rank, tuple(offsets), tuple(sizes))
