"""Micro-batches from token sequences, packed one after another or padded side by side.

Legend: s positions, b sequences, P predicted (response) tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megatron_ext.train.logprob import Prediction
from megatron_ext.train.microbatch import RowLayout


@dataclass(frozen=True)
class TokenSequence:
    """Prompt and response. index: place in the global batch, -1 for a filler that only keeps ranks in step.

    old_logprobs, reference_logprobs: float32 [response_len]; without old ones, those of
    the policy being trained stand in. label: what errors call the sequence, besides its index.
    """

    index: int
    tokens: tuple[int, ...]
    prompt_len: int
    advantage: float = 0.0
    old_logprobs: np.ndarray | None = field(default=None, compare=False, repr=False)
    reference_logprobs: np.ndarray | None = field(default=None, compare=False, repr=False)
    label: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_len < len(self.tokens):
            raise ValueError(f"{self}: expected 1 <= prompt_len < length, found prompt_len {self.prompt_len}, length {len(self.tokens)}")
        for name in ("old_logprobs", "reference_logprobs"):
            values = getattr(self, name)
            if values is not None and (values.dtype != np.float32 or values.shape != (self.response_len,)):
                raise ValueError(f"{self}: {name}: expected float32 [{self.response_len}], found {values.dtype} {list(values.shape)}")

    def __str__(self) -> str:
        return f"sequence {self.index}" + (f" ({self.label})" if self.label else "")

    @property
    def response_len(self) -> int:
        return len(self.tokens) - self.prompt_len


FILLER = TokenSequence(index=-1, tokens=(0, 0), prompt_len=1)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward pass. ids: int64 [b, s]; padding is token 0."""

    sequences: tuple[TokenSequence, ...]
    ids: torch.Tensor
    packed: bool
    layout: RowLayout
    prediction: Prediction

    @property
    def num_tokens(self) -> int:
        """Response tokens of real sequences."""
        return sum(sequence.response_len for sequence in self.sequences if sequence.index >= 0)

    @property
    def num_sequences(self) -> int:
        """Real sequences."""
        return sum(sequence.index >= 0 for sequence in self.sequences)

    def per_token(self, value: Callable[[TokenSequence], float]) -> torch.Tensor:
        """fp32 [P]: a number of each sequence, repeated for its response tokens; 0 for fillers."""
        numbers = [value(s) if s.index >= 0 else 0.0 for s in self.sequences for _ in range(s.response_len)]
        return torch.tensor(numbers, dtype=torch.float32)

    def logprobs(self, name: str, instead_P: torch.Tensor) -> torch.Tensor:
        """fp32 [P]: "old_logprobs" or "reference_logprobs" of the sequences; where one has none, `instead_P`."""
        given = [getattr(sequence, name) for sequence in self.sequences]
        parts = instead_P.split([sequence.response_len for sequence in self.sequences])
        return torch.cat([part if values is None else torch.from_numpy(values) for values, part in zip(given, parts, strict=True)])

    def split(self, values_P: torch.Tensor) -> dict[int, torch.Tensor]:
        """Per real sequence its values, by index."""
        parts = values_P.split([sequence.response_len for sequence in self.sequences])
        return {s.index: part for s, part in zip(self.sequences, parts, strict=True) if s.index >= 0}


def make_microbatches(
    sequences: Sequence[TokenSequence], micro_batch_size: int, rank: int, ranks: int, pack: bool, temperature: float, multiple_of: int
) -> list[MicroBatch]:
    """The micro-batches of one data-parallel rank, equally many on every rank.

    Ranks take consecutive, equally long runs of sequences, topped up with fillers. `micro_batch_size` sequences form one
    micro-batch; its length is a multiple of `multiple_of` (TP under sequence parallelism).
    """
    per_rank = -(-len(sequences) // ranks)
    mine = list(sequences[rank * per_rank : (rank + 1) * per_rank])
    mine += [FILLER] * (per_rank - len(mine))
    starts = range(0, per_rank, micro_batch_size)
    return [_microbatch(mine[i : i + micro_batch_size], pack, temperature, multiple_of) for i in starts]


def _microbatch(sequences: list[TokenSequence], pack: bool, temperature: float, multiple_of: int) -> MicroBatch:
    lengths = [len(sequence.tokens) for sequence in sequences]
    if pack:
        layout = RowLayout.packed(lengths, multiple_of)
        ids = torch.zeros(1, layout.seq, dtype=torch.int64)
        starts = layout.cu_seqlens.tolist()
    else:
        longest = max(lengths)
        layout = RowLayout.padded(longest + -longest % multiple_of, len(sequences))
        ids = torch.zeros(len(sequences), layout.seq, dtype=torch.int64)
        starts = [index * layout.seq for index in range(len(sequences))]
    flat = ids.view(-1)
    for start, sequence in zip(starts, sequences):
        flat[start : start + len(sequence.tokens)] = torch.tensor(sequence.tokens)
    return MicroBatch(tuple(sequences), ids, pack, layout, _prediction(sequences, starts, temperature))


def _prediction(sequences: list[TokenSequence], starts: list[int], temperature: float) -> Prediction:
    """The row before each response token predicts it."""
    rows = [torch.arange(s.prompt_len - 1, len(s.tokens) - 1) + start for start, s in zip(starts, sequences)]
    targets = [torch.tensor(s.tokens[s.prompt_len :]) for s in sequences]
    lengths = torch.tensor([0, *(s.response_len for s in sequences)])
    names = tuple(str(s) for s in sequences)
    return Prediction(torch.cat(rows), torch.cat(targets), lengths.cumsum(0).to(torch.int32), temperature, names)
