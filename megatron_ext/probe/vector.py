"""Assumptions about the vector core. fp32; X elements."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_ext.probe.device import BLOCKS, Device
from megatron_ext.probe.inputs import revealing
from megatron_ext.probe.question import Answer, Question, all_hold, compare
from megatron_ext.probe.subnormals import combined
from megatron_ext.reference import elementary
from megatron_ext.reference.sums import ordered_sum, row_sum
from megatron_ext.reduction_order import ROW_SUM_BLOCK

SIZE = 4096
NEGATIVE_ZERO = -0.0


def exponents() -> torch.Tensor:
    """Arguments of exp with normal results."""
    return torch.linspace(-87.0, 88.0, SIZE)


def positives() -> torch.Tensor:
    return revealing(SIZE).abs() + 1e-6


FUNCTIONS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "exp": (exponents, elementary.exp),
    "ln": (positives, elementary.log),
    "sqrt": (positives, elementary.sqrt),
    "div": (positives, lambda x: x / x.flip(0)),
}  # fmt: skip


def evaluate(device: Device, name: str, x_X: torch.Tensor, **options) -> torch.Tensor:
    return device.vector(name, x_X, x_X.flip(0), **options)


def function_bits(name: str) -> Callable[[Device], Answer]:
    """Whether the device's function is that of the reference."""

    def ask(device: Device) -> Answer:
        arguments, function = FUNCTIONS[name]
        return compare(evaluate(device, name, arguments()), function(arguments()), name)

    return ask


# ---- what a result must not depend on


def lanes(device: Device) -> Answer:
    """Every function, at other places and with other counts."""
    answers = []
    for name, (arguments, _) in FUNCTIONS.items():
        x, y = arguments(), arguments().flip(0)
        whole = device.vector(name, x, y)
        for shift in (1, 3, 8, 77):
            answers.append(compare(device.vector(name, x.roll(shift), y.roll(shift)), whole.roll(shift), f"{name}, moved by {shift}"))
        for count in (1, 7, 65):
            answers.append(compare(device.vector(name, x, y, count=count), whole[:count], f"{name} of {count} elements"))
    return all_hold(answers)


def cores(device: Device) -> Answer:
    copies = {name: evaluate(device, name, arguments(), blocks=BLOCKS) for name, (arguments, _) in FUNCTIONS.items()}
    return all_hold([compare(copy, copy[:1].expand_as(copy).contiguous(), f"{name} on another core") for name, copy in copies.items()])


# ---- sums


def repeat_tree(device: Device) -> Answer:
    x = revealing(SIZE)
    return compare(device.vector("repeat_sum", x, count=ROW_SUM_BLOCK), ordered_sum(x.view(-1, ROW_SUM_BLOCK).T), "sums of repeats")


def sum_of_repeats(device: Device) -> Answer:
    x = revealing(SIZE)
    return all_hold([compare(device.vector("sum", x, count=count), row_sum(x[:count])[None], f"ReduceSum of {count}") for count in (64, 640, SIZE)])


def sum_of_zeros(device: Device) -> Answer:
    x = torch.full((SIZE,), NEGATIVE_ZERO)
    return compare(device.vector("sum", x, count=640), torch.zeros(1), "ReduceSum of -0")


def masked_lanes(device: Device) -> Answer:
    """Masked lanes hold numbers that would show."""
    x = revealing(SIZE)
    answers = []
    for mask in (1, 8, 40, 63):
        kept = x.view(-1, ROW_SUM_BLOCK).clone()
        kept[:, mask:] = 0.0
        answers.append(compare(device.vector("repeat_sum", x, count=mask), ordered_sum(kept.T), f"{mask} of {ROW_SUM_BLOCK} lanes"))
    return all_hold(answers)


# ---- special values


def filled(*values: float) -> torch.Tensor:
    """One repeat, whose first elements are given."""
    x = torch.ones(ROW_SUM_BLOCK)
    x[: len(values)] = torch.tensor(values)
    return x


def copies_keep_zeros(device: Device) -> Answer:
    x = filled(0.0, NEGATIVE_ZERO, 1.0, -1.0, float("inf"))
    return compare(device.vector("keep", x), x, "x + -0")


def maximum_of_nan(device: Device) -> Answer:
    nan = float("nan")
    found = device.vector("max", filled(nan, 1.0, nan), filled(1.0, nan, nan), count=3)
    return compare(found, torch.full((3,), nan), "Max")


def maximum_of_zeros(device: Device) -> Answer:
    found = device.vector("max", filled(0.0, NEGATIVE_ZERO), filled(NEGATIVE_ZERO, 0.0), count=2)
    return compare(found, torch.tensor([NEGATIVE_ZERO, 0.0]), "Max")


def overflow_to_half(device: Device) -> Answer:
    infinity = float("inf")
    found = device.vector("round_f16", filled(1e5, -1e5, infinity, 65519.0), count=4)
    return compare(found, torch.tensor([infinity, -infinity, infinity, 65504.0]), "fp32 to half")


def subnormals(device: Device) -> Answer:
    """Of operands and of results, in every kind of instruction."""

    def first(operation: str, x: float, y: float = 0.0, count: int = 1) -> float:
        return device.vector(operation, torch.full((ROW_SUM_BLOCK,), x), torch.full((ROW_SUM_BLOCK,), y), count=count)[0].item()

    smallest = 2.0**-149
    return combined({
        "add": (first("add", smallest, smallest), 2 * smallest),
        "mul, result": (first("mul", 2.0**-70, 2.0**-70), 2.0**-140),
        "mul, operand": (first("mul", 2.0**-140, 2.0**100), 2.0**-40),
        "div": (first("div", 2.0**-126, 2.0**10), 2.0**-136),
        "max": (first("max", 2.0**-140, 0.0), 2.0**-140),
        "copy": (first("keep", 2.0**-140), 2.0**-140),
        "round_bf16": (first("round_bf16", 2.0**-130), 2.0**-130),
        "sum": (first("sum", smallest, count=ROW_SUM_BLOCK), ROW_SUM_BLOCK * smallest),
        "exp": (float(0.0 < first("exp", -100.0) < 2.0**-126), 1.0),
    })  # fmt: skip


QUESTIONS = (
    *(Question(f"{name}_bits", f"{name} has the bits of the reference", "reference", function_bits(name)) for name in FUNCTIONS),
    Question("vector_lanes", "exp, ln, sqrt and div depend on their argument alone: not on lane, count or neighbours", "promise", lanes),
    Question("vector_cores", "every vector core computes the same bits", "promise", cores),
    Question("vector_subnormals", "vector instructions keep subnormal operands and results", "promise", subnormals),
    Question("sum_tree", "lanes of a repeat are added in a tree of neighbours", "reference", repeat_tree),
    Question("sum_of_repeats", "ReduceSum by count adds repeats one after another", "reference", sum_of_repeats),
    Question("sum_of_zeros", "ReduceSum by count starts at +0", "reference", sum_of_zeros),
    Question("masked_lanes", "a masked lane is +0 in a sum", "note", masked_lanes),
    Question("copies_keep_zeros", "x + -0 is x, the sign of zero included", "reference", copies_keep_zeros),
    Question("maximum_of_nan", "a maximum with NaN is NaN", "reference", maximum_of_nan),
    Question("maximum_of_zeros", "a maximum of zeros is the second one", "reference", maximum_of_zeros),
    Question("overflow_to_half", "fp32 beyond the range of half becomes infinity", "reference", overflow_to_half),
)
