"""Group-relative advantages by hand."""

import math
import random

import pytest

from megatron_ext.rl.advantages import EPSILON, group_advantages


def test_by_hand():
    """Rewards 1, 0, 0, 0: mean 1/4, sample deviation 1/2."""
    found = group_advantages([1.0, 0.0, 0.0, 0.0, 3.0, 1.0, 3.0, 1.0], 4)
    first = [0.75 / (0.5 + EPSILON)] + [-0.25 / (0.5 + EPSILON)] * 3
    deviation = math.sqrt(4 / 3)
    assert found == pytest.approx([*first, *[sign / (deviation + EPSILON) for sign in (1, -1, 1, -1)]], rel=1e-12)
    assert group_advantages([1.0, 0.0, 0.0, 0.0], 4, by_std=False) == [0.75, -0.25, -0.25, -0.25]


def test_equal_rewards_teach_nothing():
    """Exactly zero, also where the mean of equal numbers is not that number."""
    assert group_advantages([0.1] * 3 + [1e300] * 3, 3) == [0.0] * 6


def test_order_of_a_group_does_not_show():
    """Sums are exactly rounded: 1e20 swallows 1 in a running sum, in one order and not in another."""
    rewards = [1e20, 1.0, -1e20, 3.0, 0.1, 0.2, 0.3, -7.0]
    expected = dict(zip(rewards, group_advantages(rewards, 8), strict=True))
    for seed in range(20):
        shuffled = random.Random(seed).sample(rewards, 8)
        assert dict(zip(shuffled, group_advantages(shuffled, 8), strict=True)) == expected


@pytest.mark.parametrize(("count", "size"), [(4, 1), (5, 2), (3, 4)])
def test_impossible_groups(count, size):
    with pytest.raises(ValueError, match=f"{count} rewards in groups of {size}"):
        group_advantages([0.0] * count, size)
