"""Parallel layouts of the two sides. They are independent of each other; the order makes them equal."""

from __future__ import annotations

import dataclasses


class LayoutError(ValueError):
    """A layout that cannot be laid out."""


@dataclasses.dataclass(frozen=True)
class TrainLayout:
    """Megatron's parallel sizes. dp counts replicas of the dense layers; expert parallelism uses ranks of tp x dp.

    sequence_parallel: None means on exactly when tp > 1. etp: expert tensor parallel size; None means 1 when ep > 1, else tp
    (Megatron's own default).
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int | None = None
    etp: int | None = None
    sequence_parallel: bool | None = None
    dispatcher: str = "alltoall"

    @property
    def expert_tensor_parallel(self) -> int:
        return self.etp or (1 if self.ep > 1 else self.tp)

    @property
    def world_size(self) -> int:
        """Ranks; without dp, the fewest that hold the experts. Raises LayoutError if the experts' ranks do not fit."""
        experts, dense = self.ep * self.expert_tensor_parallel, self.tp
        dp = self.dp or max(1, experts // dense)
        if (dense * dp) % experts:
            raise LayoutError(f"ep x etp = {experts} does not divide tp x dp = {dense * dp}; choose --train-dp accordingly")
        return dense * dp * self.pp

    def arguments(self) -> dict:
        """Keyword arguments of `train.client.layout_flags`."""
        return {
            "tp": self.tp, "pp": self.pp, "ep": self.ep, "etp": self.expert_tensor_parallel,
            "sequence_parallel": self.sequence_parallel, "dispatcher": self.dispatcher,
        }  # fmt: skip

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "EP": self.ep, "PP": self.pp, "ETP": self.expert_tensor_parallel}
        name = "x".join(f"{key}{size}" for key, size in sizes.items() if size > 1) or "TP1"
        name += f"xDP{self.dp}" if self.dp and self.dp > 1 else ""
        sequence_parallel = self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel
        return name + "+SP" * sequence_parallel + f" ({self.dispatcher})"


@dataclasses.dataclass(frozen=True)
class RolloutLayout:
    """vLLM's parallel sizes. expert_parallel spreads the experts over the TP ranks."""

    tp: int = 1
    expert_parallel: bool = False

    def __str__(self) -> str:
        return f"TP{self.tp}" + "+EP" * self.expert_parallel
