"""An assumption that no documentation confirms, and what is lost where it fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from megatron_ext.probe.device import Device

CONSEQUENCES = {
    "promise": "training and rollout may differ: this device cannot keep the contract",
    "reference": "both engines agree on this device, but not with the bits of the reference",
    "note": "no kernel relies on it",
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """detail: what was seen. value: what was found, where there is a choice."""

    holds: bool
    detail: str = ""
    value: str | None = None


@dataclasses.dataclass(frozen=True)
class Question:
    """matters: a key of CONSEQUENCES. ask: the experiment; it may raise what a kernel reports."""

    name: str
    assumption: str
    matters: str
    ask: Callable[[Device], Answer]


def compare(found: torch.Tensor, expected: torch.Tensor, what: str) -> Answer:
    """Whether the bits are equal; the payload of a NaN carries nothing. fp32."""
    different = (found.view(torch.int32) != expected.view(torch.int32)) & ~(found.isnan() & expected.isnan())
    if not different.any():
        return Answer(True)
    first = tuple(different.nonzero()[0].tolist())
    values = f"{found[first].item()!r}, expected {expected[first].item()!r}"
    return Answer(False, f"{what}: {int(different.sum())} of {different.numel()} differ, the first at {list(first)}: {values}")


def all_hold(answers: Sequence[Answer]) -> Answer:
    """The first that does not hold, or that all do."""
    return next((answer for answer in answers if not answer.holds), Answer(True))
