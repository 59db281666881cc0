"""Copies with gaps and padding against the documented addresses."""

import pytest
import torch
from host_library import KernelError, library, runnable_variants

ELEMENTS = 1024
BLOCK = 16  # 16-bit elements of a DataBlock
PAD = -5
BUILDS = [("checked", "portable"), ("fast", runnable_variants()[0])]


@pytest.fixture(params=BUILDS, ids="-".join, scope="module")
def lib(request):
    return library("copy_functions.cpp", *request.param)


def run(lib, name: str, count=1, length=1, src_gap=0, dst_gap=0, is_pad=0, left=0, right=0) -> torch.Tensor:
    src, dst = torch.arange(1, ELEMENTS + 1, dtype=torch.int16), torch.zeros(ELEMENTS, dtype=torch.int16)
    lib.run(name, src, dst, torch.tensor([count, length, src_gap, dst_gap, is_pad, left, right]))
    return dst


def rows(count: int, length: int, src_step: int, dst_step: int, left: int = 0) -> torch.Tensor:
    """count rows of `length` elements, row starts src_step and dst_step apart."""
    expected = torch.zeros(ELEMENTS, dtype=torch.int16)
    for r in range(count):
        expected[r * dst_step + left : r * dst_step + left + length] = torch.arange(length) + r * src_step + 1
    return expected


@pytest.mark.parametrize("name", ["load_blocks", "store_blocks"])
@pytest.mark.parametrize("count, length, src_gap, dst_gap", [(1, 64, 0, 0), (5, 2, 3, 0), (4, 1, 0, 5), (3, 4, 1, 2)])
def test_gaps_are_blocks_between_the_end_of_a_row_and_the_next(lib, name, count, length, src_gap, dst_gap):
    expected = rows(count, length * BLOCK, (length + src_gap) * BLOCK, (length + dst_gap) * BLOCK)
    assert torch.equal(run(lib, name, count, length, src_gap, dst_gap), expected)


@pytest.mark.parametrize("left, right", [(0, 0), (0, 3), (2, 3), (5, 0)])
@pytest.mark.parametrize("length", [10, 14, 32, 37])
def test_padded_load(lib, length, left, right):
    """Gaps: bytes in global memory, blocks in UB. With isPad, the value fills both sides up to a whole block."""
    count, src_gap, dst_gap = 4, 3, 1
    width = -(-(left + length + right) // BLOCK) * BLOCK
    step = width + dst_gap * BLOCK
    expected = rows(count, length, length + src_gap, step, left)
    for r in range(count):
        expected[r * step : r * step + left] = PAD
        expected[r * step + left + length : r * step + width] = PAD
    assert torch.equal(run(lib, "load_pad", count, length * 2, src_gap * 2, dst_gap, 1, left, right), expected)


def test_load_without_padding_value_repeats_the_first_element(lib):
    found = run(lib, "load_pad", 2, 20, 0, 0)
    assert torch.equal(found[:16], torch.tensor([*range(1, 11), *[1] * 6], dtype=torch.int16))
    assert torch.equal(found[16:32], torch.tensor([*range(11, 21), *[11] * 6], dtype=torch.int16))


@pytest.mark.parametrize("length", [1, 16, 23])
def test_unaligned_store_takes_whole_blocks_from_the_buffer(lib, length):
    count, src_gap, dst_gap = 5, 1, 4
    expected = rows(count, length, -(-length // BLOCK) * BLOCK + src_gap * BLOCK, length + dst_gap)
    assert torch.equal(run(lib, "store_pad", count, length * 2, src_gap, dst_gap * 2), expected)


def test_single_elements_of_global_memory(lib):
    expected = torch.zeros(ELEMENTS, dtype=torch.int16)
    expected[3] = 10 + 5 + 1 + 1
    assert torch.equal(run(lib, "scalar_global"), expected)


def test_limits_of_copies():
    checked = library("copy_functions.cpp", "checked")
    with pytest.raises(KernelError, match="DataCopyPad at .*: a blockLen of whole elements is required, found 3"):
        run(checked, "load_pad", 1, 3)
    with pytest.raises(KernelError, match="leftPadding of at most 32 bytes is required, found 17"):
        run(checked, "load_pad", 1, 32, left=17, is_pad=1)
    with pytest.raises(KernelError, match=r"DataCopy at .*: dst covers bytes \[2016, 2080\), outside UB buffer"):
        run(checked, "load_blocks", 2, 2, 0, 61)
    with pytest.raises(KernelError, match=r"1 <= blockCount <= 4095 is required, found 0"):
        run(checked, "store_blocks", 0, 2)
