"""Each modelled vector function against its documented meaning, bit for bit, in the checked flavour and in every fast variant."""

import math

import numpy as np
import pytest
import torch
from host_library import library, runnable_variants

from megatron_ext.reference import elementary, sums

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32}
BUILDS = [("checked", "portable"), *(("fast", variant) for variant in runnable_variants())]
RINT, FLOOR, CEIL, ROUND, TRUNC = 1, 2, 3, 4, 5


@pytest.fixture(params=BUILDS, ids="-".join, scope="module")
def lib(request):
    return library("vector_functions.cpp", *request.param)


def values(suffix: str, count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if suffix == "i32":
        return torch.randint(-40000, 40000, (count,), generator=generator, dtype=torch.int32)
    spread = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-3, 4, (count,), generator=generator)
    return spread.to(DTYPES[suffix])


def awkward_floats(count: int) -> torch.Tensor:
    special = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-40, -1e-45, 3.4e38, 2.0**-126, 88.0, -103.9, 89.5, 0.5, 1.5, 2.5, -2.5]
    x = values("f32", count, seed=5)
    x[: len(special)] = torch.tensor(special)
    return x


def assert_equal_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    integer = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[found.element_size()]
    different = found.view(integer) != expected.view(integer)
    if found.is_floating_point():
        different &= ~(found.isnan() & expected.isnan())  # the payload of a NaN carries nothing
    assert not different.any(), f"at {different.nonzero().flatten()[:5].tolist()}: {found[different][:5]} != {expected[different][:5]}"


def divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.float() / b.float()).to(a.dtype)


OPERATORS = {"Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Max": torch.maximum, "Min": torch.minimum, "Div": divide}
BINARY_CASES = [(name, suffix) for name in OPERATORS for suffix in ("f32", "f16", "i32") if (name, suffix) != ("Div", "i32")]


@pytest.mark.parametrize("name, suffix", BINARY_CASES)
def test_binary_count(lib, name, suffix):
    for count in (1, 7, 64, 200):
        x, y, old = (values(suffix, 256, seed) for seed in range(3))
        expected = old.clone()
        expected[:count] = OPERATORS[name](x, y)[:count]
        assert_equal_bits(lib.vector(f"{name}_{suffix}", [x, y], old, [count]), expected)


@pytest.mark.parametrize("name", OPERATORS)
def test_binary_in_place(lib, name):
    x, y, old = (values("f32", 128, seed) for seed in range(3))
    expected = old.clone()
    expected[:100] = OPERATORS[name](old, y)[:100]
    assert_equal_bits(lib.vector(f"{name}_inplace_f32", [x, y], old, [100]), expected)


@pytest.mark.parametrize("name", ["Add", "Mul", "Div", "Max"])
def test_binary_special_values(lib, name):
    x = awkward_floats(64)
    y = x.roll(7)
    for a, b, suffix in ((x, y, "f32"), (x.half(), y.half(), "f16")):
        assert_equal_bits(lib.vector(f"{name}_{suffix}", [a, b], torch.zeros_like(a), [64]), OPERATORS[name](a, b))


@pytest.mark.parametrize("repeats", [1, 5])
def test_accumulating_repeats(lib, repeats):
    """A repeat stride of 0 for dst and src0: every repeat adds to what the one before it left."""
    x, start = values("f32", 64 * repeats), values("f32", 64, 1)
    expected = start.clone()
    for row in x.view(repeats, 64):
        expected = expected + row
    assert_equal_bits(lib.vector("Add_mask_inplace_f32", [x], start, [64, repeats, 1, 1, 1, 0, 0, 8]), expected)


def lane_positions(count: int, repeats: int, block_stride: int, repeat_stride: int, lanes_per_block: int, lanes: int) -> torch.Tensor:
    """Element of an operand for every lane of every repeat."""
    lane = torch.arange(lanes)
    blocks = lane // lanes_per_block * block_stride
    return ((torch.arange(repeats)[:, None] * repeat_stride + blocks) * lanes_per_block + lane % lanes_per_block)[:, :count]


STRIDES = [
    (1, 1, 1, 8, 8, 8),
    (1, 1, 0, 8, 8, 0),  # one block of src1 for everything
    (1, 1, 0, 8, 8, 1),  # one block of src1 per repeat, as after Brcb
    (2, 1, 1, 16, 8, 0),  # a gap between the blocks of dst, one repeat of src1 for all
]


@pytest.mark.parametrize("suffix, lanes, per_block", [("f32", 64, 8), ("f16", 128, 16)])
@pytest.mark.parametrize("strides", STRIDES)
def test_binary_repeats(lib, suffix, lanes, per_block, strides):
    dst_block, src0_block, src1_block, dst_repeat, src0_repeat, src1_repeat = strides
    for mask in (lanes, 5, lanes // 2 + 3):
        repeats = 3
        x, y, old = (values(suffix, lanes * repeats * 2, seed) for seed in range(3))
        to, first, second = (
            lane_positions(mask, repeats, block, repeat, per_block, lanes)
            for block, repeat in ((dst_block, dst_repeat), (src0_block, src0_repeat), (src1_block, src1_repeat))
        )
        expected = old.clone()
        expected[to] = x[first] + y[second]
        assert_equal_bits(lib.vector(f"Add_mask_{suffix}", [x, y], old, [mask, repeats, *strides]), expected)


def test_mask_bits(lib):
    bits = 0x8421_0000_FFFF_0003
    chosen = torch.tensor([bits >> lane & 1 for lane in range(64)], dtype=torch.bool).repeat(2)
    x, y, old = (values("f32", 128, seed) for seed in range(3))
    p = [0, 2, 1, 1, 1, 8, 8, 8, 0, 0, bits - 2**64, 0]
    expected = torch.where(chosen, x + y, old)
    assert_equal_bits(lib.vector("Add_bits_f32", [x, y], old, p), expected)
    assert_equal_bits(lib.vector("Add_normal_f32", [x, y], old, p), expected)


def test_mask_bits_of_sixteen_bit_elements(lib):
    low, high = 0x00FF_0000_0000_0001, 0x0000_0000_8000_0001
    chosen = torch.tensor([(high << 64 | low) >> lane & 1 for lane in range(128)], dtype=torch.bool)
    x, y, old = (values("f16", 128, seed) for seed in range(3))
    p = [0, 1, 1, 1, 1, 8, 8, 8, 0, 0, low, high]
    assert_equal_bits(lib.vector("Mul_bits_f16", [x, y], old, p), torch.where(chosen, x * y, old))


def test_counter_mode(lib):
    x, y, old = (values("f32", 256, seed) for seed in range(3))
    expected = old.clone()
    expected[:150] = (x + y)[:150]
    assert_equal_bits(lib.vector("Add_counter_f32", [x, y], old, [150, 0, 1, 1, 1, 8, 8, 8]), expected)


@pytest.mark.parametrize("name, suffix, operator", [("Adds", "f32", torch.add), ("Muls", "f32", torch.mul), ("Muls", "f16", torch.mul)])
def test_scalar_operand(lib, name, suffix, operator):
    x, old = values(suffix, 192), values(suffix, 192, 1)
    scalar = torch.tensor(1.7, dtype=torch.float32).to(DTYPES[suffix])
    expected = old.clone()
    expected[:130] = operator(x, scalar)[:130]
    assert_equal_bits(lib.vector(f"{name}_{suffix}", [x], old, [130], scalar.item()), expected)


def test_scalar_operand_repeats(lib):
    x, old = values("f32", 128), values("f32", 128, 1)
    expected = old.view(2, 64).clone()
    expected[:, :9] = torch.maximum(x.view(2, 64)[:, :9], torch.tensor(0.25))
    assert_equal_bits(lib.vector("Maxs_mask_f32", [x], old, [9, 2, 1, 1, 8, 8], 0.25), expected.flatten())
    assert_equal_bits(lib.vector("Maxs_f32", [x], old, [128], 0.25), torch.maximum(x, torch.tensor(0.25)))


def square_root(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded, which torch.sqrt of fp32 is not everywhere (MKL: an ulp off for one value in six on the machine this was
    written on). Rounding the square root of fp64 once more to fp32 is exact."""
    return x.double().sqrt().float()


@pytest.mark.parametrize("name, reference", [("Exp", elementary.exp), ("Ln", elementary.log), ("Sqrt", square_root)])
def test_unary(lib, name, reference):
    x = torch.cat([awkward_floats(64), torch.linspace(-104, 89, 960), torch.logspace(-44, 38, 1024)])
    assert_equal_bits(lib.vector(f"{name}_f32", [x], torch.zeros_like(x), [x.numel()]), reference(x))
    half = x[:128]
    expected = torch.ones(128).view(2, 64)
    expected[:, :24] = reference(half).view(2, 64)[:, :24]
    assert_equal_bits(lib.vector(f"{name}_mask_f32", [half], torch.ones(128), [24, 2, 1, 1, 8, 8]), expected.flatten())


# ---- Cast


@pytest.mark.parametrize("to, source", [("f32", "f16"), ("f32", "bf16")])
def test_widening_cast(lib, to, source):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[source])
    for part in x.split(8192):
        assert_equal_bits(lib.vector(f"Cast_{to}_{source}", [part], torch.zeros(8192), [8192, 0]), part.float())


def directed(x: torch.Tensor, dtype: torch.dtype, mode: int) -> torch.Tensor:
    """Rounding of finite fp32 numbers by its definition: the two neighbours in dtype, and which one the mode wants."""
    nearest = x.to(dtype)
    below = torch.where(nearest.double() <= x.double(), nearest, step(nearest, -1))
    above = torch.where(nearest.double() >= x.double(), nearest, step(nearest, 1))
    if mode == FLOOR:
        return below
    if mode == CEIL:
        return above
    if mode == TRUNC:
        return torch.where(x > 0, below, above)
    to_below, to_above = x.double() - below.double(), above.double() - x.double()
    away = torch.where(x > 0, above, below)
    return torch.where(to_below == to_above, away, nearest)


def step(x: torch.Tensor, direction: int) -> torch.Tensor:
    """The next number of a 16-bit float type."""
    bits = x.view(torch.int16).int() & 0xFFFF
    ordered = torch.where(bits >= 0x8000, 0x8000 - bits, bits)  # -0 and +0 are both 0
    ordered = ordered + direction
    bits = torch.where(ordered < 0, 0x8000 - ordered, ordered)
    return bits.to(torch.int32).to(torch.int16).view(x.dtype)


def cast_inputs() -> torch.Tensor:
    ties = (torch.arange(512, dtype=torch.float32) + 0.5) / 512 + 1  # halfway between bf16 and between half numbers
    return torch.cat([values("f32", 960), ties, -ties, torch.tensor([65503.0, 1e-7, -1e-7, 6e-8, 2.0**-25, 3.0 * 2.0**-26, -(2.0**-26), 0.0] * 8)])


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_narrowing_cast(lib, dtype):
    x = cast_inputs()
    empty = torch.zeros(x.numel(), dtype=DTYPES[dtype])
    special = torch.cat([x, torch.tensor([math.nan, math.inf, -math.inf, 1e38, -0.0, 1e-45, 65519.0, 65520.0])])
    found = lib.vector(f"Cast_{dtype}_f32", [special], torch.zeros(special.numel(), dtype=DTYPES[dtype]), [special.numel(), RINT])
    assert_equal_bits(found, special.to(DTYPES[dtype]))
    for mode in (FLOOR, CEIL, ROUND, TRUNC):
        found = lib.vector(f"Cast_{dtype}_f32", [x], empty, [x.numel(), mode])
        assert torch.equal(found.float(), directed(x, DTYPES[dtype], mode).float())


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_narrowing_around_every_value(lib, dtype):
    """Each finite value of the type, the middle to the next one, and the fp32 numbers beside that middle."""
    values_16 = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    values_16 = values_16[values_16.isfinite()]
    middle = ((values_16[:-1].double() + values_16[1:].double()) / 2).float()
    beside = [middle.nextafter(torch.tensor(to)) for to in (-math.inf, math.inf)]
    x = torch.cat([values_16.float(), middle, *beside])
    x = torch.cat([x, -x, torch.zeros(-2 * x.numel() % 8192)])
    for part in x.split(8192):
        found = lib.vector(f"Cast_{dtype}_f32", [part], torch.zeros(8192, dtype=DTYPES[dtype]), [8192, RINT])
        assert_equal_bits(found, part.to(DTYPES[dtype]))


def test_cast_to_and_from_integers(lib):
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 2.4, -2.6, 3e9, -3e9, 2147483520.0, 1e-30, 0.0, -0.0, math.inf, -math.inf])
    clamped = x.double().clamp(-(2**31), 2**31 - 1)
    rounded = {RINT: clamped.round(), FLOOR: clamped.floor(), CEIL: clamped.ceil(), TRUNC: clamped.trunc()}
    rounded[ROUND] = torch.sign(clamped) * (clamped.abs() + 0.5).floor()
    for mode, expected in rounded.items():
        found = lib.vector("Cast_i32_f32", [x], torch.zeros(16, dtype=torch.int32), [16, mode])
        assert_equal_bits(found, expected.clamp(-(2**31), 2**31 - 1).to(torch.int32))
        finite = x[:14]
        assert torch.equal(lib.vector("Cast_f32_f32", [finite], torch.zeros(14), [14, mode]).double()[:8], expected[:8])
    whole = torch.tensor([0, 1, -1, 2**24 + 1, -(2**24) - 1, 2**24 + 3, 2**31 - 1, -(2**31)], dtype=torch.int32)
    assert_equal_bits(lib.vector("Cast_f32_i32", [whole], torch.zeros(8), [8, RINT]), whole.float())
    truncated = torch.tensor([0.0, 1.0, -1.0, 2.0**24, -(2.0**24), 2.0**24 + 2, 2.0**31 - 128, -(2.0**31)])
    assert_equal_bits(lib.vector("Cast_f32_i32", [whole], torch.zeros(8), [8, TRUNC]), truncated)
    every_byte = torch.arange(256, dtype=torch.uint8)
    assert_equal_bits(lib.vector("Cast_f16_u8", [every_byte], torch.zeros(256, dtype=torch.float16), [256, 0]), every_byte.half())
    assert_equal_bits(lib.vector("Cast_u8_f16", [every_byte.half()], torch.zeros(256, dtype=torch.uint8), [256, RINT]), every_byte)
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -3.0, 254.5, 255.5, 300.0, math.inf, -math.inf, 0.0, -0.0, 1.25, 1.75, 7.0, 65504.0]).half()
    for mode, expected in {RINT: x.float().round(), FLOOR: x.float().floor(), CEIL: x.float().ceil(), TRUNC: x.float().trunc()}.items():
        found = lib.vector("Cast_u8_f16", [x], torch.zeros(16, dtype=torch.uint8), [16, mode])
        assert_equal_bits(found, expected.clamp(0, 255).to(torch.uint8))


def test_cast_repeats(lib):
    """A repeat of a widening Cast is 64 elements; the source advances by its own strides."""
    x = values("f16", 128)
    expected = torch.zeros(128).view(2, 64)
    expected[:, :40] = x.view(2, 64)[:, :40].float()
    assert_equal_bits(lib.vector("Cast_mask_f32_f16", [x], torch.zeros(128), [40, 2, 1, 1, 8, 4]), expected.flatten())


# ---- filling, gathering, choosing


def test_duplicate(lib):
    expected = torch.zeros(96)
    expected[:70] = 2.5
    assert_equal_bits(lib.vector("Duplicate_f32", [], torch.zeros(96), [70], 2.5), expected)
    expected = torch.zeros(96, dtype=torch.bfloat16)
    expected[:33] = 2.5
    assert_equal_bits(lib.vector("Duplicate_bf16", [], torch.zeros(96, dtype=torch.bfloat16), [33], 2.5), expected)
    expected = torch.zeros(256)
    expected[lane_positions(20, 2, 2, 16, 8, 64)] = -1.0
    assert_equal_bits(lib.vector("Duplicate_mask_f32", [], torch.zeros(256), [20, 2, 2, 16], -1.0), expected)


@pytest.mark.parametrize("suffix, per_block", [("f32", 8), ("f16", 16)])
def test_brcb(lib, suffix, per_block):
    x = values(suffix, 16)
    out = torch.zeros(16 * per_block, dtype=DTYPES[suffix])
    assert_equal_bits(lib.vector(f"Brcb_{suffix}", [x], out, [2, 1, 8]), x.repeat_interleave(per_block))
    spaced = lib.vector(f"Brcb_{suffix}", [x], out.repeat(2), [2, 2, 16]).view(16, 2, per_block)
    assert_equal_bits(spaced[:, 0].flatten(), x.repeat_interleave(per_block))


@pytest.mark.parametrize("suffix", ["f32", "f16"])
def test_gather(lib, suffix):
    x = values(suffix, 128)
    index = torch.randint(0, 96, (72,), generator=torch.Generator().manual_seed(1))
    offsets = (index * x.element_size()).to(torch.int32)
    base = 16 * x.element_size()
    found = lib.vector(f"Gather_{suffix}", [x, offsets], torch.zeros(72, dtype=x.dtype), [72, base])
    assert_equal_bits(found, x[index + 16])


def packed(bits: torch.Tensor) -> torch.Tensor:
    """Bit i of byte i / 8, lowest first."""
    return (bits.view(-1, 8).to(torch.int32) << torch.arange(8)).sum(1).to(torch.uint8)


COMPARISONS = [torch.lt, torch.gt, torch.eq, torch.le, torch.ge, torch.ne]


@pytest.mark.parametrize("mode", range(6))
def test_compare(lib, mode):
    x = awkward_floats(128)
    y = torch.where(torch.arange(128) % 3 == 0, x, x.roll(1))
    empty = torch.zeros(16, dtype=torch.uint8)
    assert_equal_bits(lib.vector("Compare_f32", [x, y], empty, [128, mode]), packed(COMPARISONS[mode](x, y)))
    assert_equal_bits(lib.vector("Compare_f16", [x.half(), y.half()], empty, [128, mode]), packed(COMPARISONS[mode](x.half(), y.half())))
    assert_equal_bits(lib.vector("Compares_f32", [x], empty, [128, mode], 1.0), packed(COMPARISONS[mode](x, torch.tensor(1.0))))


def test_select(lib):
    x, y = values("f32", 72), values("f32", 72, 1)
    bits = torch.randint(0, 2, (72,), generator=torch.Generator().manual_seed(2)).bool()
    mask = packed(bits)
    assert_equal_bits(lib.vector("Select_f32", [x, y, mask], torch.zeros(72), [72]), torch.where(bits, x, y))
    assert_equal_bits(lib.vector("Select_scalar_f32", [x, y, mask], torch.zeros(72), [72], -math.inf), torch.where(bits, x, -math.inf))


@pytest.mark.parametrize("count", [8, 61, 192])
def test_select_leaves_what_lies_beyond_count(lib, count):
    x, y = values("f16", 256), values("f16", 256, 1)
    bits = torch.randint(0, 2, (256,), generator=torch.Generator().manual_seed(3)).bool()
    expected = torch.full((256,), 7.0, dtype=torch.float16)
    expected[:count] = torch.where(bits, x, y)[:count]
    assert_equal_bits(lib.vector("Select_f16", [x, y, packed(bits)], torch.full_like(x, 7.0), [count]), expected)


def test_single_elements(lib):
    x = values("f32", 8)
    expected = torch.zeros(8)
    expected[1] = x[3] + 1.0
    assert_equal_bits(lib.vector("GetSet_f32", [x], torch.zeros(8), []), expected)


# ---- reductions: the order is the point


def cancelling(count: int) -> torch.Tensor:
    """Pairs (2i, 2i + 1) of +1e20 and -1e20 among small numbers: they vanish in a tree of adjacent pairs and swallow others elsewhere."""
    x = values("f32", count, seed=9).view(-1, 2)
    chosen = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(count))[: x.shape[0] // 4]
    x[chosen] = torch.tensor([1e20, -1e20])
    return x.flatten()


def one_after_another(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.add.accumulate(x.numpy(), dtype=np.float32))[-1]


@pytest.mark.parametrize("count", [64, 128, 640, 4096])
def test_reduce_sum_is_the_row_sum_of_the_contract(lib, count):
    x = cancelling(count)
    found = lib.vector("ReduceSum_f32", [x, torch.zeros(64)], torch.zeros(8), [count])[0]
    assert_equal_bits(found, sums.row_sum(x))
    assert found != one_after_another(x), "these numbers do not show the order"


def test_reduce_sum_order_by_hand():
    lib = library("vector_functions.cpp", "checked")
    x = torch.zeros(128)
    x[0], x[1], x[64] = 1e20, 1.0, -1e20  # (1e20 + 1) - 1e20: the 1 is lost inside the first repeat
    assert lib.vector("ReduceSum_f32", [x, torch.zeros(64)], torch.zeros(8), [128])[0] == 0.0
    x = torch.zeros(128)
    x[0], x[2], x[3], x[1] = 1e20, 1.0, 0.0, -1e20  # pairs (0, 1) and (2, 3): the 1 survives
    assert lib.vector("ReduceSum_f32", [x, torch.zeros(64)], torch.zeros(8), [128])[0] == 1.0


def test_whole_block_and_pair_sums(lib):
    x = cancelling(192)
    rows = x.view(3, 64)
    whole = sums.ordered_sum(rows.T)
    assert_equal_bits(lib.vector("WholeReduceSum_f32", [x], torch.zeros(8), [64, 3, 1, 1, 8])[:3], whole)
    spaced = lib.vector("WholeReduceSum_f32", [x], torch.zeros(8), [64, 3, 2, 1, 8])
    assert_equal_bits(spaced[:6:2], whole)
    assert_equal_bits(lib.vector("ReduceRepeat_sum_f32", [x], torch.zeros(8), [64, 3, 1, 1, 8])[:3], whole)
    blocks = sums.ordered_sum(x.view(24, 8).T.contiguous())
    assert_equal_bits(lib.vector("BlockReduceSum_f32", [x], torch.zeros(24), [64, 3, 1, 1, 8]), blocks)
    pairs = x.view(96, 2).sum(1)
    assert_equal_bits(lib.vector("PairReduceSum_f32", [x], torch.zeros(96), [64, 3, 1, 1, 8]), pairs)


@pytest.mark.parametrize("repeats", [8, 21])
def test_sums_of_many_repeats(lib, repeats):
    """Eight repeats are added together; results may follow one another, lie apart, or replace what was added."""
    x = cancelling(64 * repeats)
    whole = sums.ordered_sum(x.view(repeats, 64).T)
    for step in (1, 3):
        found = lib.vector("WholeReduceSum_f32", [x], torch.zeros(step * repeats + 8), [64, repeats, step, 1, 8])
        assert_equal_bits(found[: step * repeats : step].contiguous(), whole)
    in_place = lib.vector("WholeReduceSum_inplace_f32", [], x, [64, repeats, 1, 1, 8])
    assert_equal_bits(in_place[:repeats], whole)
    assert_equal_bits(in_place[repeats:], x[repeats:])
    overlapping = lib.vector("WholeReduceSum_f32", [x], torch.zeros(repeats), [64, repeats - 1, 1, 1, 4])
    assert_equal_bits(overlapping[: repeats - 1], sums.ordered_sum(x.unfold(0, 64, 32)[: repeats - 1].T))


def test_a_sum_may_lie_in_a_repeat_that_follows(lib):
    """Result 0 replaces the first element of repeat 2 before that is added."""
    x = cancelling(64 * 16)
    expected = x.clone()
    for r in range(14):
        expected[128 + r] = sums.ordered_sum(expected.view(16, 64)[r])
    assert_equal_bits(lib.vector("WholeReduceSum_ahead_f32", [], x, [64, 14, 1, 1, 8]), expected)


def test_blocks_that_are_masked_out_keep_what_dst_holds(lib):
    x = values("f32", 64)
    found = lib.vector("BlockReduceSum_f32", [x], torch.full((8,), 7.0), [32, 1, 1, 1, 8])
    assert_equal_bits(found[:4], sums.ordered_sum(x.view(8, 8).T)[:4])
    assert (found[4:] == 7.0).all()
    found = lib.vector("BlockReduceMax_f32", [x], torch.full((8,), 7.0), [20, 1, 1, 1, 8])
    expected = torch.stack([x[:8].max(), x[8:16].max(), x[16:20].max()])
    assert_equal_bits(found, torch.cat([expected, torch.full((5,), 7.0)]))


def test_strided_reduction(lib):
    """A source block stride of 0 reads one block eight times; a repeat stride of 1 moves by one block."""
    x = cancelling(64)
    repeated = x.view(8, 8)[:3].repeat(1, 8)
    assert_equal_bits(lib.vector("WholeReduceSum_f32", [x], torch.zeros(8), [64, 3, 1, 0, 1])[:3], sums.ordered_sum(repeated.T))


@pytest.mark.parametrize("suffix, lanes", [("f32", 64), ("f16", 128)])
def test_maximum_with_index(lib, suffix, lanes):
    x = values(suffix, 3 * lanes)
    x[5] = x[lanes - 1] = x[2 * lanes] = x.abs().max() + 1  # ties: the lowest index
    index_type = {"f32": torch.int32, "f16": torch.int16}[suffix]
    out = torch.zeros(16, dtype=x.dtype)
    found = lib.vector(f"ReduceMax_{suffix}", [x, torch.zeros(64)], out, [3 * lanes, 1])
    assert found[0] == x.max() and found[1:2].view(index_type) == 5
    found = lib.vector(f"ReduceMax_{suffix}", [x, torch.zeros(64)], out, [3 * lanes, 0])
    assert found[0] == x.max() and found[1] == 0

    best = x.view(3, lanes).max(dim=1)
    by_order = [lib.vector(f"WholeReduceMax_{suffix}", [x], out, [lanes, 3, 1, 1, 8, order]) for order in range(4)]
    assert_equal_bits(by_order[0][:6:2].contiguous(), best.values)
    assert by_order[0].view(index_type)[1] == 5
    assert_equal_bits(by_order[1][1:6:2].contiguous(), best.values)
    assert by_order[1].view(index_type)[0] == 5
    assert_equal_bits(by_order[2][:3], best.values)
    assert by_order[3].view(torch.int32)[0] == 5


def first_largest(row: torch.Tensor) -> int:
    """NaN before all, then the largest; the first of equals, so that of two zeros the first one's sign shows."""
    found = (row.isnan() if row.isnan().any() else row == row.max()).nonzero()
    return int(found[0])


def test_maximum_of_special_values(lib):
    x = -values("f32", 64 * 12).abs().view(12, 64)
    x[0, 9], x[0, 50] = 0.0, -0.0
    x[1, 9], x[1, 10] = -0.0, 0.0
    x[2, 63] = math.nan
    x[3, 7], x[3, 8] = math.inf, math.nan
    x[4, :] = -math.inf
    x[5, 33], x[5, 34] = math.inf, math.inf
    at = torch.tensor([first_largest(row) for row in x])
    largest = x[torch.arange(12), at]
    pairs = lib.vector("WholeReduceMax_f32", [x], torch.zeros(24), [64, 12, 1, 1, 8, 0])
    assert_equal_bits(pairs[::2].contiguous(), largest)
    assert torch.equal(pairs.view(torch.int32)[1::2].long(), at)
    assert_equal_bits(lib.vector("WholeReduceMax_f32", [x], torch.zeros(16), [64, 12, 1, 1, 8, 2])[:12], largest)
    blocks = x.view(96, 8)
    expected = torch.stack([row[first_largest(row)] for row in blocks])
    assert_equal_bits(lib.vector("BlockReduceMax_f32", [x], torch.zeros(96), [64, 12, 1, 1, 8]), expected)
    for row in x:
        for count in (64, 61, 11):
            found = lib.vector("ReduceMax_f32", [row.contiguous(), torch.zeros(64)], torch.zeros(8), [count, 1])
            first = first_largest(row[:count])
            assert_equal_bits(found[:1], row[first : first + 1])
            assert found.view(torch.int32)[1] == first


def test_maximum_ignores_masked_lanes(lib):
    x = values("f32", 64)
    x[40] = 1e30
    found = lib.vector("WholeReduceMax_f32", [x], torch.zeros(8), [33, 1, 1, 1, 8, 2])
    assert found[0] == x[:33].max()
