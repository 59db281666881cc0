"""The gate: one differing bit stops a run and is named, or is told and passed."""

import numpy as np
import pytest

from megatron_ext.parity import logdiff
from megatron_ext.rl import gate

NAMES = ["prompt 4 sample 0", "prompt 9 sample 1"]


def verdict(change=None):
    rollout = [np.array([-1.0, -2.0], np.float32), np.array([-3.0, -0.0], np.float32)]
    train = [values.copy() for values in rollout]
    if change is not None:
        train[1][1] = change
    return logdiff.compare(train, rollout, [[5, 6], [7, 8]])


def test_equal_bits_pass():
    assert gate.check(verdict(), "stop", 3, NAMES, "a pass") is None


@pytest.mark.parametrize("change", [0.0, -1e-45, -0.5])
def test_any_bit_stops(change):
    """Also the sign of a zero, and the smallest subnormal."""
    with pytest.raises(gate.LogdiffError, match="step 3: 1 of 4 sampled tokens .*a pass.*prompt 9 sample 1, position 1, token 8: .*check_parity"):
        gate.check(verdict(change), "stop", 3, NAMES, "a pass")


def test_warn_tells():
    assert "max |logdiff| 0.5" in gate.check(verdict(-0.5), "warn", 3, NAMES, "a pass")
