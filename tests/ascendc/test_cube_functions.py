"""Loading, Mmad and Fixpipe against reference/sums.py, in both orders of addition, every variant and thread count."""

import math

import pytest
import torch
from host_library import library, runnable_variants

from megatron_ext.reduction_order import MMAD_ORDERS
from megatron_ext.reference.sums import contract

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
BUILDS = [("checked", "portable"), *(("fast", variant) for variant in runnable_variants())]


@pytest.fixture(params=BUILDS, ids="-".join, scope="module")
def lib(request):
    return library("matmul.cpp", *request.param)


def cancelling(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values of many sizes: sums of their products depend on the order."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * 10.0 ** torch.randint(-2, 3, (rows, columns), generator=generator)).to(dtype)


def run(lib, a_MK, b_KN, out_dtype="f32", order="sequential", k_tile=64, a_rows_of_m=False, b_rows_of_n=True, threads=1):
    dtype = {torch.bfloat16: "bf16", torch.float16: "f16"}[a_MK.dtype]
    (m, k), n = a_MK.shape, b_KN.shape[1]
    a = a_MK.T.contiguous() if a_rows_of_m else a_MK.contiguous()
    b = b_KN.contiguous() if b_rows_of_n else b_KN.T.contiguous()
    c = torch.full((m, n), -7.0, dtype=DTYPES[out_dtype])
    tiling = torch.tensor([m, n, k, k_tile, a_rows_of_m, b_rows_of_n], dtype=torch.int32)
    lib.run(f"matmul_{dtype}_{out_dtype}", a, b, c, tiling, threads, MMAD_ORDERS.index(order))
    return c


@pytest.mark.parametrize("order", MMAD_ORDERS)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("m, n, k", [(16, 16, 16), (2, 32, 96), (17, 48, 80), (70, 16, 224)])
def test_matmul_is_one_piece_of_a_contraction(lib, m, n, k, dtype, order):
    a, b = cancelling(m, k, DTYPES[dtype], 1), cancelling(k, n, DTYPES[dtype], 2)
    expected = contract(a.float(), b.float(), order)
    for a_rows_of_m in (False, True):
        for b_rows_of_n in (False, True):
            assert torch.equal(run(lib, a, b, order=order, a_rows_of_m=a_rows_of_m, b_rows_of_n=b_rows_of_n), expected)


def test_the_two_orders_differ(lib):
    a, b = cancelling(32, 96, torch.bfloat16, 1), cancelling(96, 32, torch.bfloat16, 2)
    assert not torch.equal(run(lib, a, b, order="sequential"), run(lib, a, b, order="groups16"))


@pytest.mark.parametrize("order", MMAD_ORDERS)
@pytest.mark.parametrize("k", [5, 24, 70])
def test_what_lies_beyond_k_takes_no_part(lib, k, order):
    """The last fractal holds NaN beyond k (checked flavour: poison), which must not enter the sum."""
    a, b = cancelling(18, k, torch.bfloat16, 3), cancelling(k, 32, torch.bfloat16, 4)
    assert torch.equal(run(lib, a, b, order=order), contract(a.float(), b.float(), order))


def test_tiles_of_k_do_not_show(lib):
    a, b = cancelling(20, 192, torch.float16, 5), cancelling(192, 48, torch.float16, 6)
    expected = run(lib, a, b, k_tile=192 // 4)
    for k_tile in (16, 32, 64):
        assert torch.equal(run(lib, a, b, k_tile=k_tile), expected)


def test_order_by_hand(lib):
    """1e20 + 1 - 1e20 + 1: one after another leaves 1, adjacent pairs leave 0."""
    a = torch.zeros(2, 16, dtype=torch.bfloat16)
    a[:, :4] = torch.tensor([1e20, 1.0, -1e20, 1.0])
    ones = torch.ones(16, 16, dtype=torch.bfloat16)
    assert (run(lib, a, ones, order="sequential") == 1.0).all()
    assert (run(lib, a, ones, order="groups16") == 0.0).all()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_fixpipe_rounds_to_nearest_even(lib, dtype):
    a, b = cancelling(40, 64, DTYPES[dtype], 7), cancelling(64, 32, DTYPES[dtype], 8)
    fp32 = run(lib, a, b)
    assert torch.equal(run(lib, a, b, out_dtype=dtype).view(torch.int16), fp32.to(DTYPES[dtype]).view(torch.int16))
    tie = torch.zeros(16, 16, dtype=DTYPES[dtype])
    tie[:, 0], tie[:, 1] = 1.0, 2.0 ** {"bf16": -8, "f16": -11}[dtype]
    ones = torch.ones(16, 16, dtype=DTYPES[dtype])
    assert (run(lib, tie, ones, out_dtype=dtype) == 1.0).all()


def test_subnormal_products_are_kept(lib):
    a = torch.full((16, 16), 2.0**-70, dtype=torch.bfloat16)
    assert (run(lib, a, a) == 2.0**-136).all()


@pytest.mark.parametrize("variant", runnable_variants())
def test_threads_do_not_show(variant):
    fast = library("matmul.cpp", "fast", variant)
    a, b = cancelling(333, 128, torch.bfloat16, 9), cancelling(128, 64, torch.bfloat16, 10)
    for order in MMAD_ORDERS:
        expected = contract(a.float(), b.float(), order)
        for threads in (1, 2, 4):
            assert torch.equal(run(fast, a, b, order=order, threads=threads), expected)


def equal_or_both_nan(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.nan_to_num(nan=12345.0, posinf=math.inf, neginf=-math.inf), y.nan_to_num(nan=12345.0, posinf=math.inf, neginf=-math.inf))


@pytest.mark.parametrize("order", MMAD_ORDERS)
@pytest.mark.parametrize("scale", [2.0**-70, 2.0**-66, 2.0**63, 2.0**64])
def test_products_that_fp32_cannot_hold(lib, scale, order):
    """Below 2^-149 and above 2^128 a fused multiply-add is not a multiplication and an addition: the model must not use it there."""
    generator = torch.Generator().manual_seed(11)
    a = (torch.randn(24, 32, generator=generator) * scale).bfloat16()
    b = (torch.randn(32, 16, generator=generator) * scale).bfloat16()
    assert equal_or_both_nan(run(lib, a, b, order=order), contract(a.float(), b.float(), order))


@pytest.mark.parametrize("order", MMAD_ORDERS)
def test_infinities_and_nan(lib, order):
    a, b = cancelling(16, 32, torch.bfloat16, 12), cancelling(32, 16, torch.bfloat16, 13)
    a[3, 4], a[5, 6], b[7, 8] = math.inf, -math.inf, math.nan
    assert equal_or_both_nan(run(lib, a, b, order=order), contract(a.float(), b.float(), order))


def read_back(src: torch.Tensor, params: list[int], fractal: int) -> torch.Tensor:
    """Two fractals of L1, one below the other, after DataCopy to NZ."""
    out = torch.zeros(32, 16)
    identity = torch.eye(16, dtype=torch.float16)
    library("nz.cpp", "fast", runnable_variants()[0]).run("run_read_back", src, identity, out, torch.tensor([*params, fractal]))
    return out


def test_matrices_side_by_side_in_nz():
    """Two matrices of 16 x 23 with rows of 32; the second goes 16 rows below the first, and the last block ends in zeros."""
    src = torch.arange(2 * 16 * 32).view(2, 16, 32).half()
    params = [2, 16, 23, 16 * 32, 32, 32, 1, 16 * 16]
    assert torch.equal(read_back(src, params, 0), src[:, :, :16].reshape(32, 16).float())
    second = torch.zeros(2, 16, 16)
    second[:, :, :7] = src[:, :, 16:23].float()
    assert torch.equal(read_back(src, params, 2), second.view(32, 16))


def test_rows_apart_in_nz():
    """Every second row of the destination, matrix after matrix."""
    src = torch.arange(2 * 16 * 16).view(2, 16, 16).half()
    interleaved = read_back(src, [2, 16, 16, 256, 16, 32, 2, 16], 0).view(16, 2, 16)
    assert torch.equal(interleaved.transpose(0, 1), src.float())
