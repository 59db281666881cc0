"""Group-relative advantages (GRPO, arXiv:2402.03300), in fp64 with exactly rounded sums: no order of a group's samples shows."""

from __future__ import annotations

import math
from collections.abc import Sequence

EPSILON = 1e-6  # as in verl: keeps a group of nearly equal rewards from exploding


def group_advantages(rewards: Sequence[float], group_size: int, by_std: bool = True) -> list[float]:
    """(reward - mean of its group) / (standard deviation of the group + EPSILON); undivided without `by_std` (arXiv:2503.20783).

    rewards: of the samples of one prompt after another. The deviation is that of a sample (n - 1). A group of equal rewards gets
    zeros. Raises ValueError if groups have fewer than two samples or do not fill up.
    """
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards in groups of {group_size}: expected whole groups of at least 2 samples")
    groups = [rewards[start : start + group_size] for start in range(0, len(rewards), group_size)]
    return [advantage for group in groups for advantage in _standardised(group, by_std)]


def _standardised(group: Sequence[float], by_std: bool) -> list[float]:
    if min(group) == max(group):
        return [0.0] * len(group)
    mean = math.fsum(group) / len(group)
    centred = [reward - mean for reward in group]
    if not by_std:
        return centred
    deviation = math.sqrt(math.fsum(c * c for c in centred) / (len(group) - 1))
    return [c / (deviation + EPSILON) for c in centred]
