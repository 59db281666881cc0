"""The policy objective: values by hand, derivatives by differences, the same bits on both backends and at every offset."""

import math

import pytest
import torch

from megatron_ext import ops
from megatron_ext.ops import PolicyObjective
from megatron_ext.ops.loss import IMPORTANCE_LEVELS
from megatron_ext.parity.bits import assert_same_bits


@pytest.fixture(autouse=True)
def native():
    from megatron_ext.ops import backend
    from megatron_ext.reduction_order import ReductionOrder

    ops.configure(ReductionOrder(), "ascendc")
    yield
    backend._active = None


def fp32(*values):
    return torch.tensor(values, dtype=torch.float32)


def terms(logprobs, old, advantages, objective=PolicyObjective(), reference=None, weights=None, cu=None):
    cu = torch.tensor(cu or [0, len(logprobs)], dtype=torch.int32)
    return ops.policy_terms(logprobs, old, advantages, torch.ones_like(logprobs) if weights is None else weights, cu, objective, reference)


def test_on_policy_the_terms_are_the_advantages():
    """Old and new logprobs equal: ratio exactly 1, and the gradient that of the plain policy gradient, bit for bit."""
    logprobs, advantages = fp32(-0.1, -3.0, -20.0), fp32(1.5, -2.0, 0.25)
    value, slope = terms(logprobs, logprobs, advantages)
    assert_same_bits(value, -advantages)
    assert_same_bits(slope, ops.policy_gradient_terms(logprobs, advantages, torch.ones(3))[1])


@pytest.mark.parametrize(("ratio", "advantage", "term", "clipped"), [
    (1.1, 1.0, -1.1, False),
    (1.5, 1.0, -1.28, True),  # above 1 + clip_high: no gain in going further
    (1.5, -1.0, 1.5, False),  # but the way back is open
    (0.5, 1.0, -0.5, False),
    (0.5, -1.0, 0.8, True),
])  # fmt: skip
def test_clipping_by_hand(ratio, advantage, term, clipped):
    objective = PolicyObjective(clip_low=0.2, clip_high=0.28)
    value, slope = terms(fp32(math.log(ratio)), fp32(0.0), fp32(advantage), objective)
    assert value.item() == pytest.approx(term, rel=1e-6)
    assert slope.item() == pytest.approx(0.0 if clipped else -advantage * ratio, rel=1e-6)


def test_kl_by_hand():
    """r - log r - 1 with r = exp(reference - logprob) = 2: 0.3069; derivative 1 - r = -1."""
    value, slope = terms(fp32(-1.0), fp32(-1.0), fp32(0.0), PolicyObjective(kl_coef=0.1), reference=fp32(-1.0 + math.log(2)))
    assert value.item() == pytest.approx(0.1 * (2 - math.log(2) - 1), rel=1e-5)
    assert slope.item() == pytest.approx(-0.1, rel=1e-5)


def test_sequence_level_ratio_by_hand():
    """GSPO: the mean difference of a sequence decides for all its tokens; other sequences do not matter."""
    logprobs, old = fp32(-1.0, -2.0, -3.0, -1.0), fp32(-1.2, -2.1, -3.0, -0.5)
    value, _ = terms(logprobs, old, fp32(1.0, 1.0, 1.0, 1.0), PolicyObjective(1.0, 9.0, importance_level="sequence"), cu=[0, 3, 4])
    assert value.tolist() == pytest.approx([-math.exp(0.1)] * 3 + [-math.exp(-0.5)], rel=1e-6)


@pytest.mark.parametrize("level", IMPORTANCE_LEVELS)
def test_derivatives_by_differences(level):
    """Of the weighted sum, away from the clip's corner."""
    torch.manual_seed(0)
    logprobs, old, reference = (-torch.rand(7) * 3 for _ in range(3))
    advantages, weights = torch.randn(2).repeat_interleave(torch.tensor([3, 4])), fp32(1 / 3, 1 / 4).repeat_interleave(torch.tensor([3, 4]))
    objective = PolicyObjective(1.0, 50.0, kl_coef=0.2, importance_level=level)

    def total(shifted):
        return terms(shifted, old, advantages, objective, reference, weights, [0, 3, 7])[0].double().sum().item()

    _, slope = terms(logprobs, old, advantages, objective, reference, weights, [0, 3, 7])
    for index in range(7):
        step = torch.zeros(7)
        step[index] = 1e-2
        assert slope[index].item() == pytest.approx((total(logprobs + step) - total(logprobs - step)) / 2e-2, rel=2e-3, abs=1e-4)


@pytest.mark.parametrize("level", IMPORTANCE_LEVELS)
def test_backends_and_places_agree(both, level):
    """A sequence's terms do not depend on the backend, on its neighbours or on where it stands."""
    torch.manual_seed(1)
    logprobs, old, reference, advantages = -torch.rand(50) * 9, -torch.rand(50) * 9, -torch.rand(50) * 9, torch.randn(50)
    objective = PolicyObjective(kl_coef=0.3, importance_level=level)
    native, reference_bits = both(lambda: torch.stack(terms(logprobs, old, advantages, objective, reference, cu=[0, 13, 30, 50])))
    assert_same_bits(native, reference_bits)
    ops.configure(ops.active_order(), "ascendc")
    part = slice(13, 30)
    alone = torch.stack(terms(logprobs[part], old[part], advantages[part], objective, reference[part]))
    assert_same_bits(alone, native[:, part].contiguous())


@pytest.mark.parametrize(("options", "message"), [
    ({"clip_low": 1.5}, "0 <= clip_low <= 1"), ({"clip_high": -0.1}, "clip_high >= 0"), ({"kl_coef": -1.0}, "kl_coef >= 0"),
    ({"importance_level": "word"}, "importance_level"),
])  # fmt: skip
def test_impossible_objectives_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PolicyObjective(**options)


def test_kl_without_reference_is_refused():
    with pytest.raises(ValueError, match="reference policy"):
        terms(fp32(-1.0), fp32(-1.0), fp32(1.0), PolicyObjective(kl_coef=0.1))
