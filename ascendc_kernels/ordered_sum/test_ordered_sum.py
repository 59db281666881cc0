"""ordered_sum: the bits of reference/sums.py on every implementation, thread count and layout; refusals; registration."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import revealing

from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reference import sums

op = torch.ops.megatron_ext.ordered_sum
OUT_DTYPES = [None, torch.bfloat16, torch.float16]


def expected(parts: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    total = sums.ordered_sum(parts)
    return total if dtype is None else total.to(dtype)


def exercise() -> None:
    """Every kernel of the folder, over several tiles of every loop."""
    for out in OUT_DTYPES:
        op(torch.randn(4, 13000), out)


@pytest.mark.parametrize("out", OUT_DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (2, 1), (4, 17, 33), (8, 3, 4099), (64, 130), (256, 65)])
def test_equals_the_reference(implementation, shape, out):
    parts = revealing(*shape, dtype=torch.float32)
    assert_same_bits(op(parts, out), expected(parts, out))


def test_the_order_is_a_tree_of_neighbours(implementation):
    parts = torch.tensor([1e20, -1e20, 1.0, 2.0])[:, None].expand(4, 40)
    assert op(parts).tolist() == [3.0] * 40
    assert op(parts[[0, 2, 1, 3]]).tolist() == [0.0] * 40


def test_zeros_keep_their_sign(implementation):
    assert_same_bits(op(torch.full((1, 40), -0.0)), torch.full((40,), -0.0))
    assert_same_bits(op(torch.full((4, 40), -0.0)), torch.full((40,), -0.0))


def test_strides_and_offsets_do_not_show(implementation):
    whole = revealing(4, 9, 70, dtype=torch.float32)
    for parts in (whole[:, 1:, 3:], whole.transpose(1, 2), whole[:, ::2], whole.expand(4, 9, 70)):
        assert_same_bits(op(parts), expected(parts, None))


def test_threads_do_not_show(threaded):
    parts = revealing(8, 40_001, dtype=torch.float32)
    for threads, total in threaded(lambda: op(parts, torch.bfloat16)).items():
        assert_same_bits(total, expected(parts, torch.bfloat16), f"{threads} threads")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5), st.integers(1, 300), st.sampled_from(OUT_DTYPES), st.integers(0, 2**31))
def test_generated(levels, size, out, seed):
    parts = revealing(2**levels, size, dtype=torch.float32, seed=seed)
    assert_same_bits(op(parts, out), expected(parts, out))


def test_an_empty_part_gives_an_empty_sum():
    assert op(torch.empty(2, 0, 5)).shape == (0, 5)


@pytest.mark.parametrize(("parts", "arguments", "error", "text"), [
    (torch.zeros(3, 2), (), ValueError, "power of two of parts, at most 256, found 3"),
    (torch.zeros(512, 2), (), ValueError, "found 512"),
    (torch.zeros(0, 2), (), ValueError, "found 0"),
    (torch.zeros(2, 2).half(), (), TypeError, "parts must be Float, found Half"),
    (torch.zeros(2, 2), (torch.int32,), TypeError, "dtype must be float32, bfloat16 or float16"),
])  # fmt: skip
def test_refusals(parts, arguments, error, text):
    with pytest.raises(error, match=text):
        op(parts, *arguments)


def test_registration():
    torch.library.opcheck(op.default, (torch.randn(4, 3, 5),))
    torch.library.opcheck(op.default, (torch.randn(4, 3, 5), torch.bfloat16))


def test_a_gradient_is_refused():
    with pytest.raises(RuntimeError, match="not implemented"):
        op(torch.randn(2, 5, requires_grad=True)).sum().backward()
