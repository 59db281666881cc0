"""The comparison itself: it counts bits, not closeness, and names the first difference."""

import numpy as np
import pytest

from megatron_ext.parity import logdiff
from megatron_ext.parity.bits import BitsDiffer, assert_same_bits


def arrays(*rows):
    return [np.array(row, dtype=np.float32) for row in rows]


def test_equal_bits_are_exact():
    verdict = logdiff.compare(arrays([-1.5, -2.0], [-0.25]), arrays([-1.5, -2.0], [-0.25]), [[3, 4], [5]])
    assert verdict.exact and verdict.tokens == 3 and verdict.logdiff_max == 0.0 and verdict.first is None


def test_one_ulp_is_a_difference_and_is_named():
    rollout = arrays([-1.5, -2.0], [-0.25])
    train = arrays([-1.5, -2.0], [np.nextafter(np.float32(-0.25), np.float32(0))])
    verdict = logdiff.compare(train, rollout, [[3, 4], [5]])
    assert not verdict.exact and verdict.mismatched_tokens == 1
    assert 0 < verdict.logdiff_max < 1e-7
    assert (verdict.first.prompt, verdict.first.position, verdict.first.token_id) == (1, 0, 5)


def test_signed_zero_is_a_difference():
    assert logdiff.compare(arrays([0.0]), arrays([-0.0]), [[1]]).mismatched_tokens == 1


@pytest.mark.parametrize(("train", "rollout", "ids", "message"), [
    (arrays([1.0]), arrays([1.0], [2.0]), [[1]], "1 training, 2 rollout"),
    (arrays([1.0]), arrays([1.0, 2.0]), [[1, 2]], "prompt 0: 1 training logprobs, 2 rollout"),
    ([np.array([1.0])], arrays([1.0]), [[1]], "must be float32"),
    (arrays([]), arrays([]), [[]], "no sampled token"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(train, rollout, ids, message):
    with pytest.raises(ValueError, match=message):
        logdiff.compare(train, rollout, ids)


def test_an_empty_comparison_is_never_exact():
    assert not logdiff.Verdict(0, 0, 0.0, 0.0, 0.0, None).exact


def test_merge_adds_up():
    good = logdiff.compare(arrays([-1.0, -1.0]), arrays([-1.0, -1.0]), [[1, 2]])
    bad = logdiff.compare(arrays([-1.0, -3.0]), arrays([-1.0, -1.0]), [[1, 2]])
    merged = logdiff.merge([good, bad])
    assert (merged.tokens, merged.mismatched_tokens, merged.logdiff_max, merged.logdiff_mean_abs) == (4, 1, 2.0, 0.5)
    assert merged.first == bad.first


def test_assert_same_bits_names_the_first_index_and_both_values():
    import torch

    with pytest.raises(BitsDiffer, match=r"x: 1 of 4 elements differ in bits, the first at \[1, 0\]: 3.0 .* expected 2.0"):
        assert_same_bits(torch.tensor([[0.0, 1.0], [3.0, 1.0]]), torch.tensor([[0.0, 1.0], [2.0, 1.0]]), "x")
