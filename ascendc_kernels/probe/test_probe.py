"""The probe's kernels: bits of the reference, copies of every block, refusals, registration. What they are for: tests/probe."""

import pytest
import torch
from inputs import revealing

from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reduction_order import MMAD_ORDERS
from megatron_ext.reference import elementary, sums

op = torch.ops.megatron_ext
ROW = 8192


def exercise() -> None:
    """Every kernel of the folder, over several tiles of every loop."""
    for dtype in (torch.bfloat16, torch.float16):
        op.probe_mmad(torch.ones(16, 48, dtype=dtype), torch.ones(16, 48, dtype=dtype), 16, 40, 16)
    for operation in ("add", "round_bf16", "round_f16", "sum"):
        op.probe_vector(operation, torch.ones(128), torch.ones(128), 128)
    op.probe_flags(torch.ones(5, ROW))
    op.probe_sync(torch.ones(3, ROW), 3)


SHAPES = [(16, 16, 16, 16, 16), (48, 32, 96, 70, 32), (128, 128, 256, 256, 256), (32, 48, 64, 5, 64)]


@pytest.mark.parametrize(("m", "n", "stored", "k", "call_k"), SHAPES)
def test_mmad_is_one_piece_of_a_contraction(implementation, mmad_order, dtype, m, n, stored, k, call_k):
    a, b = revealing(m, stored, dtype=dtype, seed=1), revealing(n, stored, dtype=dtype, seed=2)
    c = op.probe_mmad(a, b, m, k, call_k, 2, MMAD_ORDERS.index(mmad_order))
    expected = sums.contract(a[:, :k].float(), b[:, :k].float().T, mmad_order)
    for block in c:
        assert_same_bits(block, expected)


OPERATIONS = {
    "exp": lambda x, y: elementary.exp(x), "ln": lambda x, y: elementary.log(x), "sqrt": lambda x, y: elementary.sqrt(x), "add": torch.add,
    "mul": torch.mul, "div": torch.div, "max": torch.maximum, "keep": lambda x, y: x, "round_bf16": lambda x, y: x.bfloat16().float(),
    "round_f16": lambda x, y: x.half().float(),
}  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("count", [1, 65, 192])
def test_elementwise(implementation, operation, count):
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.rand(192, generator=generator) + 0.25 for _ in range(2))
    out = op.probe_vector(operation, x, y, count, 3)
    for block in out:
        assert_same_bits(block, OPERATIONS[operation](x, y)[:count])


def test_sums(implementation):
    x = revealing(640, dtype=torch.float32)
    assert_same_bits(op.probe_vector("sum", x, x, 640)[0], sums.row_sum(x)[None])
    assert_same_bits(op.probe_vector("repeat_sum", x, x, 64)[0], sums.ordered_sum(x.view(-1, 64).T))


@pytest.mark.parametrize("blocks", [1, 3])
def test_flags(implementation, blocks):
    x = torch.arange(7.0 * ROW).view(7, ROW)
    assert_same_bits(op.probe_flags(x, blocks), x + 1.0)


@pytest.mark.parametrize(("cores", "rounds"), [(1, 1), (5, 4)])
def test_sync(implementation, cores, rounds):
    x = torch.arange(float(cores * ROW)).view(cores, ROW)
    assert_same_bits(op.probe_sync(x, rounds), torch.stack([x.roll(-r, 0) + r + 1.0 for r in range(rounds)]))


def mmad(a=(16, 16), b=(16, 16), m=16, k=16, call_k=16, blocks=1):
    return lambda: op.probe_mmad(torch.ones(a).bfloat16(), torch.ones(b).bfloat16(), m, k, call_k, blocks)


def vector(operation="add", size=64, count=64, blocks=1):
    return lambda: op.probe_vector(operation, torch.ones(size), torch.ones(size), count, blocks)


@pytest.mark.parametrize(("call", "text"), [
    (mmad(m=17), "m must be 1 or a multiple of 16 up to 128, found 17"),
    (mmad(m=32), "m=32 needs 32 rows of a, found 16"),
    (mmad(b=(17, 16)), "b must have a multiple of 16 rows up to 128, found 17"),
    (mmad(a=(16, 24), b=(16, 24)), "K must be a multiple of 16 up to 256, found 24"),
    (mmad(b=(16, 32)), r"a must be \[rows, K\] and b \[n, K\]"),
    (mmad(k=17), "k must be from 1 to 16, found 17"),
    (mmad(call_k=8), "call_k must be a multiple of 16, found 8"),
    (mmad(blocks=0), "blocks must be at least 1, found 0"),
    (vector("sin"), "no operation sin"),
    (vector(size=65), "n must be a multiple of 64 up to 4096, found 65"),
    (vector(count=65), "count must be from 1 to 64 for add, found 65"),
    (vector("repeat_sum", 128, 65), "count must be from 1 to 64 for repeat_sum, found 65"),
    (lambda: op.probe_flags(torch.ones(3, 64)), r"x must be \[rows, 8192\]"),
    (lambda: op.probe_sync(torch.ones(3, ROW), 0), "rounds must be at least 1, found 0"),
])  # fmt: skip
def test_refusals(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_a_single_row_is_gemv_mode(implementation):
    with pytest.raises(RuntimeError, match="m == 1 is GEMV mode on a device"):
        mmad(m=1)()


def test_registration():
    a = torch.randn(16, 32).bfloat16()
    torch.library.opcheck(op.probe_mmad.default, (a, a, 16, 32, 16))
    torch.library.opcheck(op.probe_vector.default, ("exp", torch.randn(64), torch.randn(64), 64))
    torch.library.opcheck(op.probe_flags.default, (torch.randn(2, ROW),))
    torch.library.opcheck(op.probe_sync.default, (torch.randn(2, ROW), 2))
