"""The rotation of the specification against Megatron's own function, and its gradient."""

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from inputs import normal
from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reference import rope

LAYOUTS = pytest.mark.parametrize("interleaved", [False, True])


@LAYOUTS
@pytest.mark.parametrize("half", [4, 16])
def test_equals_megatron(interleaved, half):
    """In fp32, where nothing is rounded at the end, the bits are equal; x [s, b, heads, D], partly and wholly rotated."""
    x = normal(7, 2, 3, 32, dtype=torch.float32)
    angles = torch.arange(7.0)[:, None] * rope.inverse_frequencies(2 * half, 1e4)
    both = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat([angles, angles], dim=-1)
    expected = _apply_rotary_pos_emb_bshd(x, both[:, None, None], rotary_interleaved=interleaved)
    assert_same_bits(rope.apply_rope(x, angles.cos(), angles.sin(), interleaved), expected)


@LAYOUTS
def test_one_sequence_equals_its_rows(interleaved):
    x, (cos, sin) = normal(5, 3, 2, 16), rope.rope_tables(torch.arange(5), 12, 1e4, torch.bfloat16)
    rotated = rope.apply_rope(x, cos, sin, interleaved)
    for i in range(3):
        assert_same_bits(rotated[:, i], rope.apply_rope(x[:, i], cos, sin, interleaved))


def exact_rotation(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """A complex multiplication in float64."""
    r = angles.shape[-1]
    rotary = x[..., : 2 * r]
    pairs = rotary.unflatten(-1, (r, 2)) if interleaved else rotary.unflatten(-1, (2, r)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None])
    return torch.cat([(turned if interleaved else turned.transpose(-1, -2)).flatten(-2), x[..., 2 * r :]], dim=-1)


@LAYOUTS
def test_the_gradient_is_the_rotation_back(interleaved):
    """The formula by gradcheck in float64, and the specification's gradient (-sin) against the formula's, within the rounding of bf16."""
    angles = torch.arange(5.0, dtype=torch.float64)[:, None] * rope.inverse_frequencies(12, 1e4).double()
    x = normal(5, 2, 16, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: exact_rotation(x, angles, interleaved), (x,))
    dy = normal(5, 2, 16, seed=1)
    (exact,) = torch.autograd.grad(exact_rotation(x, angles, interleaved), x, dy.double())
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    assert torch.allclose(rope.apply_rope(dy, cos, -sin, interleaved).double(), exact, rtol=2**-7, atol=2**-6)
