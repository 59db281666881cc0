"""apply_rope and apply_rope_qk: the bits of reference/rope.py on every implementation, layout and stride; gradients; refusals; registration."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import normal, revealing

from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reference import rope

op = torch.ops.megatron_ext
# positions, heads, head size, pairs: whole and partial rotation; halves that are whole DataBlocks (8 pairs) or not; many tiles in each dimension
SHAPES = [(1, 32, 128, 64), (17, 5, 128, 64), (90, 3, 64, 16), (3, 300, 16, 8), (7, 2, 80, 10), (5, 3, 192, 96), (2, 6, 1024, 512), (9, 4, 7, 3), (3, 1, 2, 1)]
LAYOUTS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def exercise() -> None:
    """Every kernel of the folder, over several tiles of every loop."""
    for interleaved in (False, True):
        for tokens, heads, head_dim, r in ((90, 3, 64, 16), (2, 300, 16, 8)):
            op.apply_rope(normal(tokens, heads, head_dim), normal(tokens, r), normal(tokens, r), interleaved)


def tables(positions: int, pairs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return rope.rope_tables(torch.arange(positions) * 37, 2 * pairs, 1e4, dtype)


@LAYOUTS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(implementation, dtype, shape, interleaved):
    positions, heads, head_dim, pairs = shape
    x, (cos, sin) = revealing(positions, heads, head_dim, dtype=dtype), tables(positions, pairs, dtype)
    assert_same_bits(op.apply_rope(x, cos, sin, interleaved), rope.apply_rope(x, cos, sin, interleaved))


@LAYOUTS
def test_megatron_layout(implementation, dtype, interleaved):
    """[s, b, heads, D] with tables [s, r], and queries inside a packed QKV [s, b, groups, (q + 2) D]."""
    packed, (cos, sin) = revealing(5, 3, 2, 6 * 32, dtype=dtype), tables(5, 16, dtype)
    q = packed[..., : 4 * 32].unflatten(-1, (4, 32))
    k = packed[..., 4 * 32 : 5 * 32]
    for x in (q, k, q.flatten(2, 3), packed.view(5, 3, 12, 32)[:, :, 2:7], k[:, 1:]):
        assert_same_bits(op.apply_rope(x, cos, sin, interleaved), rope.apply_rope(x, cos, sin, interleaved), f"strides {x.stride()}")


@LAYOUTS
def test_heads_inside_a_packed_qkv(implementation, dtype, interleaved):
    """Queries and keys of vLLM's [T, (Hq + 2 Hkv) D] in one call; tables that are halves of one cache."""
    qkv, cache = revealing(19, 12 * 64, dtype=dtype), torch.cat(tables(19, 32, dtype), dim=-1)
    q, k, _ = (x.unflatten(-1, (-1, 64)) for x in qkv.split([8 * 64, 2 * 64, 2 * 64], dim=-1))
    cos, sin = cache.chunk(2, dim=-1)
    for ours, x in zip(op.apply_rope_qk(q, k, cos, sin, interleaved), (q, k), strict=True):
        assert_same_bits(ours, rope.apply_rope(x, cos, sin, interleaved))


@LAYOUTS
def test_any_stride(implementation, dtype, interleaved):
    x, (cos, sin) = revealing(6, 4, 40, dtype=dtype), tables(6, 8, dtype)
    for view in (x[:, ::2], x[..., 5:29], x.transpose(0, 1).contiguous().transpose(0, 1), x[:, :1].expand(6, 3, 40), x[..., ::2], x[:, 1], x[:1].expand(6, 4, 40)):
        assert_same_bits(op.apply_rope(view, cos, sin, interleaved), rope.apply_rope(view, cos, sin, interleaved), f"strides {view.stride()}")
    for table in (cos.T.contiguous().T, cos[:1].expand(6, 8), torch.cat([cos, sin], dim=1)[:, 3:11]):
        assert_same_bits(op.apply_rope(x, table, sin, interleaved), rope.apply_rope(x, table, sin, interleaved), f"table strides {table.stride()}")


@LAYOUTS
def test_what_does_not_rotate_keeps_its_bits(implementation, interleaved):
    """All 2^16 bit patterns pass through, NaN payloads included."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(64, 8, 128).clone()
    x[..., :16] = 1.0
    cos, sin = tables(64, 8, torch.bfloat16)
    assert_same_bits(op.apply_rope(x, cos, sin, interleaved)[..., 16:], x[..., 16:])


@LAYOUTS
def test_a_head_does_not_depend_on_its_neighbours(implementation, dtype, interleaved):
    x, (cos, sin) = revealing(70, 3, 32, dtype=dtype), tables(70, 16, dtype)
    alone = torch.stack([torch.cat([op.apply_rope(x[t : t + 1, h : h + 1], cos[t : t + 1], sin[t : t + 1], interleaved)[0] for h in range(3)]) for t in range(70)])
    assert_same_bits(op.apply_rope(x, cos, sin, interleaved), alone)


@LAYOUTS
def test_threads_do_not_show(threaded, dtype, interleaved):
    q, k, (cos, sin) = revealing(301, 8, 128, dtype=dtype), revealing(301, 2, 128, dtype=dtype), tables(301, 64, dtype)
    results = threaded(lambda: op.apply_rope_qk(q, k, cos, sin, interleaved))
    for threads, found in results.items():
        for a, b in zip(found, results[1], strict=True):
            assert_same_bits(a, b, f"{threads} threads")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 100), st.integers(0, 60), st.booleans(), st.sampled_from([torch.bfloat16, torch.float16]))
def test_generated(positions, heads, pairs, rest, interleaved, dtype):
    x, (cos, sin) = revealing(positions, heads, 2 * pairs + rest, dtype=dtype, seed=pairs), tables(positions, pairs, dtype)
    assert_same_bits(op.apply_rope(x, cos, sin, interleaved), rope.apply_rope(x, cos, sin, interleaved))


@LAYOUTS
def test_the_gradient_is_the_rotation_back(implementation, dtype, interleaved):
    """Its formula: tests/reference/test_rope.py."""
    qkv, (cos, sin) = normal(9, 12, 48, dtype=dtype).requires_grad_(), tables(9, 20, dtype)
    q, k = op.apply_rope_qk(qkv[:, :8], qkv[:, 8:10], cos, sin, interleaved)
    dq, dk = normal(9, 8, 48, dtype=dtype, seed=1), normal(9, 2, 48, dtype=dtype, seed=2)
    (grad,) = torch.autograd.grad((q, k), qkv, (dq, dk))
    expected = torch.cat([*(rope.apply_rope(dy, cos, -sin, interleaved) for dy in (dq, dk)), torch.zeros_like(dk)], dim=1)
    assert_same_bits(grad, expected, "through apply_rope_qk")
    (grad,) = torch.autograd.grad(op.apply_rope(qkv[:, :8], cos, sin, interleaved), qkv, dq)
    assert_same_bits(grad[:, :8], expected[:, :8], "through apply_rope")


def test_the_gradient_of_one_output_alone():
    q, k, (cos, sin) = normal(3, 4, 16).requires_grad_(), normal(3, 2, 16).requires_grad_(), tables(3, 8, torch.bfloat16)
    rotated = op.apply_rope_qk(q, k, cos, sin)
    dq, dk = torch.autograd.grad(rotated[0].sum(), (q, k))
    assert_same_bits(dq, rope.apply_rope(torch.ones_like(q), cos, -sin))
    assert not dk.any()


def test_no_positions_give_no_positions():
    cos, sin = tables(0, 8, torch.bfloat16)
    assert op.apply_rope(normal(0, 4, 16), cos, sin).shape == (0, 4, 16)
    q, k = op.apply_rope_qk(normal(0, 4, 16), normal(0, 2, 16), cos, sin)
    assert q.shape == (0, 4, 16) and k.shape == (0, 2, 16)


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda x, cos: op.apply_rope(x.float(), cos, cos), TypeError, "x must be bfloat16 or float16, found Float"),
    (lambda x, cos: op.apply_rope(x, cos.half(), cos), TypeError, "cos must be BFloat16, found Half"),
    (lambda x, cos: op.apply_rope(x, cos, cos[1:]), ValueError, r"sin must be \[T, r\] for x \[T, ..., D\], found shape \[2, 4\] for \[3, 2, 8\]"),
    (lambda x, cos: op.apply_rope(x, cos, cos[:, 1:]), ValueError, r"cos has shape \[3, 4\], sin \[3, 3\]"),
    (lambda x, cos: op.apply_rope(x[..., 1:], cos, cos), ValueError, "cos has r = 4 columns; 2r must be 2 to D = 7"),
    (lambda x, cos: op.apply_rope(x, cos[:, :0], cos[:, :0]), ValueError, "cos has r = 0 columns"),
    (lambda x, cos: op.apply_rope(x[0, 0], cos, cos), ValueError, r"x must be \[T, ..., D\], found shape \[8\]"),
    (lambda x, cos: op.apply_rope(x.new_zeros(3, 1, 1026), cos, cos), ValueError, "a head may have 1024 elements .* found 1026"),
    (lambda x, cos: op.apply_rope_qk(x, x[1:], cos, cos), ValueError, r"k has shape \[2, 2, 8\], q has shape \[3, 2, 8\]"),
    (lambda x, cos: op.apply_rope_qk(x, x.half(), cos, cos), TypeError, "k must be BFloat16, found Half"),
    (lambda x, cos: op.apply_rope(x, cos.requires_grad_(), cos), NotImplementedError, "cos and sin are constants"),
])  # fmt: skip
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call(normal(3, 2, 8), normal(3, 4))


@LAYOUTS
def test_registration(interleaved):
    cos, sin = tables(3, 4, torch.bfloat16)
    torch.library.opcheck(op.apply_rope.default, (normal(3, 2, 8).requires_grad_(), cos, sin, interleaved))
    torch.library.opcheck(op.apply_rope_qk.default, (normal(3, 2, 8).requires_grad_(), normal(3, 1, 8).requires_grad_(), cos, sin, interleaved))
