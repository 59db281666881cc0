"""exp, log and row_sum: the bits of reference/elementary.py and reference/sums.py on every implementation; refusals; registration."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import revealing

from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reference import elementary, sums

op = torch.ops.megatron_ext


def exercise() -> None:
    """Every kernel of the folder, over several tiles of every loop."""
    op.exp(torch.randn(20_000))
    op.log(torch.rand(20_000))
    op.row_sum(torch.randn(2, 20_000))
    op.row_sum(torch.randn(200, 100))


@pytest.mark.parametrize("name", ["exp", "log"])
def test_the_whole_range(implementation, name):
    """One in 65,003 of all fp32 bit patterns, NaN payloads aside: many tiles, the last one short."""
    x = torch.arange(0, 2**32, 65_003, dtype=torch.int64).to(torch.int32).view(torch.float32)
    ours, expected = (torch.nan_to_num(f(x), nan=-7.0, posinf=None, neginf=None) for f in (getattr(op, name), getattr(elementary, name)))
    assert_same_bits(ours, expected, name)


@pytest.mark.parametrize("name", ["exp", "log"])
def test_special_values(implementation, name):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([0.0, -0.0, inf, -inf, nan, 1.0, -1.0, 89.0, -104.0, 200.0, -200.0, 1e-45, 2.0**-126])
    ours, expected = getattr(op, name)(x), getattr(elementary, name)(x)
    assert_same_bits(ours.isnan(), expected.isnan())
    assert_same_bits(torch.where(ours.isnan(), 7.0, ours), torch.where(expected.isnan(), 7.0, expected))


WIDTHS = [1, 7, 64, 65, 128, 511, 513, 4100, 8192, 20_000]  # of one block to three tiles of the kernel


@pytest.mark.parametrize("width", WIDTHS)
def test_row_sum(implementation, width):
    x = revealing(200 if width < 1000 else 5, width, dtype=torch.float32)
    assert_same_bits(op.row_sum(x), sums.row_sum(x))


def test_row_sum_adds_blocks_one_after_another(implementation):
    x = torch.zeros(192)
    x[0], x[64], x[128], x[129] = 1e20, 1.0, -1e20, 2.0
    assert op.row_sum(x).item() == 0.0
    x[64], x[1] = 0.0, -1e20
    assert op.row_sum(x).item() == torch.tensor(-1e20).item()
    x = torch.zeros(20_000)
    x[0], x[8192 + 64], x[16_384], x[19_999] = 1e20, 1.0, -1e20, 2.0
    assert op.row_sum(x).item() == 2.0


def test_row_sum_of_negative_zeros_is_positive(implementation):
    for width in (3, 64, 9000):
        assert_same_bits(op.row_sum(torch.full((2, width), -0.0)), torch.zeros(2))


def test_shapes_and_strides(implementation):
    x = revealing(3, 40, 70, dtype=torch.float32)
    for view in (x, x[:, 3:], x.transpose(1, 2), x[..., ::2], x[:1].expand(3, 40, 70), x[0, 0], x[..., 1:]):
        assert_same_bits(op.row_sum(view), sums.row_sum(view), f"row_sum, strides {view.stride()}")
        assert_same_bits(op.exp(view), elementary.exp(view), f"exp, strides {view.stride()}")
    assert op.exp(torch.tensor(0.0)).item() == 1.0
    assert op.log(torch.empty(2, 0)).shape == (2, 0)
    assert_same_bits(op.row_sum(torch.empty(2, 0)), torch.zeros(2))


def test_a_row_does_not_depend_on_its_neighbours(implementation):
    x = revealing(70, 300, dtype=torch.float32)
    assert_same_bits(op.row_sum(x), torch.stack([op.row_sum(row) for row in x]))


def test_threads_do_not_show(threaded):
    x = revealing(301, 2100, dtype=torch.float32)
    results = threaded(lambda: (op.exp(x * 1e-14), op.log(x.abs()), op.row_sum(x)))
    for threads, found in results.items():
        for i, (a, b) in enumerate(zip(found, results[1], strict=True)):
            assert_same_bits(a, b, f"result {i} with {threads} threads")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 2000), st.integers(0, 2**31))
def test_generated(rows, width, seed):
    x = revealing(rows, width, dtype=torch.float32, seed=seed)
    assert_same_bits(op.row_sum(x), sums.row_sum(x))


@pytest.mark.parametrize("name", ["exp", "log", "row_sum"])
def test_refusals(name):
    function = getattr(op, name)
    with pytest.raises(TypeError, match=f"{name}: x must be Float, found Half"):
        function(torch.zeros(3).half())
    with pytest.raises(RuntimeError, match="not implemented"):
        function(torch.ones(2, 3, requires_grad=True)).sum().backward()
    with pytest.raises(ValueError, match="found a scalar"):
        op.row_sum(torch.tensor(1.0))


@pytest.mark.parametrize("name", ["exp", "log", "row_sum"])
def test_registration(name):
    torch.library.opcheck(getattr(op, name).default, (torch.rand(3, 4, 5),))
