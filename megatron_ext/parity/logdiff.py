"""logdiff = training logprob - rollout logprob, compared bit for bit at every sampled token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """The first token, by prompt and then by response position, whose two logprobs differ in bits."""

    prompt: int
    position: int
    token_id: int
    train: float
    rollout: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome for a set of responses. Differences in natural-log units."""

    tokens: int
    mismatched_tokens: int
    logdiff_max: float
    logdiff_mean_abs: float
    probs_diff_max: float
    first: FirstDifference | None

    @property
    def exact(self) -> bool:
        return self.tokens > 0 and self.mismatched_tokens == 0

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


def compare(train: Sequence[np.ndarray], rollout: Sequence[np.ndarray], token_ids: Sequence[Sequence[int]]) -> Verdict:
    """float32 logprobs per response, from both sides. Raises ValueError if lengths or dtypes differ, or nothing was sampled."""
    if not len(train) == len(rollout) == len(token_ids):
        raise ValueError(f"{len(train)} training, {len(rollout)} rollout and {len(token_ids)} token sequences")
    for i, (a, b, ids) in enumerate(zip(train, rollout, token_ids, strict=True)):
        if not len(a) == len(b) == len(ids):
            raise ValueError(f"prompt {i}: {len(a)} training logprobs, {len(b)} rollout logprobs, {len(ids)} tokens")
        if a.dtype != np.float32 or b.dtype != np.float32:
            raise ValueError(f"prompt {i}: logprobs must be float32, found {a.dtype} and {b.dtype}")
    flat_train, flat_rollout = np.concatenate([*train]), np.concatenate([*rollout])
    if flat_train.size == 0:
        raise ValueError("no sampled token to compare")
    differs = flat_train.view(np.int32) != flat_rollout.view(np.int32)
    diff = np.abs(flat_train.astype(np.float64) - flat_rollout.astype(np.float64))
    probs_diff = np.abs(np.exp(flat_train.astype(np.float64)) - np.exp(flat_rollout.astype(np.float64)))
    return Verdict(
        tokens=int(flat_train.size),
        mismatched_tokens=int(differs.sum()),
        logdiff_max=float(diff.max()),
        logdiff_mean_abs=float(diff.mean()),
        probs_diff_max=float(probs_diff.max()),
        first=first_difference(train, rollout, token_ids) if differs.any() else None,
    )


def first_difference(train, rollout, token_ids) -> FirstDifference:
    for prompt, (a, b, ids) in enumerate(zip(train, rollout, token_ids, strict=True)):
        where = np.flatnonzero(a.view(np.int32) != b.view(np.int32))
        if where.size:
            at = int(where[0])
            return FirstDifference(prompt, at, int(ids[at]), float(a[at]), float(b[at]))
    raise ValueError("no difference")


def merge(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict over several sets; `first` is that of the first set which has one."""
    tokens = sum(v.tokens for v in verdicts)
    return Verdict(
        tokens=tokens,
        mismatched_tokens=sum(v.mismatched_tokens for v in verdicts),
        logdiff_max=max(v.logdiff_max for v in verdicts),
        logdiff_mean_abs=sum(v.logdiff_mean_abs * v.tokens for v in verdicts) / tokens,
        probs_diff_max=max(v.probs_diff_max for v in verdicts),
        first=next((v.first for v in verdicts if v.first), None),
    )
