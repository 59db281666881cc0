"""Assumptions about Mmad.

Legend: M rows, N columns, K contraction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from megatron_ext.probe.device import BLOCKS, Device, pad_rows
from megatron_ext.probe.inputs import revealing
from megatron_ext.probe.question import Answer, Question, all_hold, compare
from megatron_ext.probe.subnormals import combined
from megatron_ext.reduction_order import FRACTAL, MMAD_ORDERS
from megatron_ext.reference.sums import contract, ordered_sum, pad_last

DTYPES = (torch.bfloat16, torch.float16)
TILE, DEPTH = 128, 256  # the largest product of one call
GROUPS = (1, 2, 4, 8, 16, 32)


def operands(m: int = TILE, n: int = TILE, k: int = DEPTH, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """a [m, k], b [n, k]."""
    return revealing(m, k, dtype=dtype, seed=1), revealing(n, k, dtype=dtype, seed=2)


# ---- order along k


def chain(products_KMN: torch.Tensor) -> torch.Tensor:
    total = products_KMN[0]
    for product in products_KMN[1:]:
        total = total + product
    return total


def in_groups(a_MK: torch.Tensor, b_KN: torch.Tensor, group: int, inside: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Groups one after another from +0, each summed by `inside`."""
    a_MK, b_KN = pad_last(a_MK, group), pad_last(b_KN.T, group).T
    total = torch.zeros(a_MK.shape[0], b_KN.shape[1])
    for first in range(0, a_MK.shape[1], group):
        total = total + inside(a_MK[:, first : first + group].T[:, :, None] * b_KN[first : first + group, None, :])
    return total


def in_wide_groups(a_MK: torch.Tensor, b_KN: torch.Tensor, group: int) -> torch.Tensor:
    """Each group and the accumulator in fp64, rounded to fp32 once."""
    a_MK, b_KN = pad_last(a_MK, group).double(), pad_last(b_KN.T, group).T.double()
    total = torch.zeros(a_MK.shape[0], b_KN.shape[1])
    for first in range(0, a_MK.shape[1], group):
        products = a_MK[:, first : first + group].T[:, :, None] * b_KN[first : first + group, None, :]
        total = (total.double() + chain(products)).float()
    return total


def known_orders() -> Iterator[tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]]:
    """The orders of the contract, then others by which a finding can be named."""
    for order in MMAD_ORDERS:
        yield order, lambda a, b, order=order: contract(a, b, order)
    yield "descending", lambda a, b: contract(a.flip(1), b.flip(0), "sequential")
    for group in GROUPS[1:]:
        yield f"groups of {group}, a chain inside", lambda a, b, group=group: in_groups(a, b, group, chain)
        yield f"groups of {group}, a tree inside", lambda a, b, group=group: in_groups(a, b, group, ordered_sum)
        yield f"groups of {group}, one rounding", lambda a, b, group=group: in_wide_groups(a, b, group)


def mmad_order(device: Device) -> Answer:
    """The one order that explains every product."""
    cases = [operands(16, 32, k, dtype) for dtype in DTYPES for k in (FRACTAL, 3 * FRACTAL, DEPTH)]
    results = [device.mmad(a, b) for a, b in cases]
    for name, product in known_orders():
        if all(compare(found, product(a.float(), b.float().T), name).holds for (a, b), found in zip(cases, results, strict=True)):
            return Answer(name in MMAD_ORDERS, f"found: {name}", name)
    return Answer(False, "none of the orders that were tried explains the products")


# ---- what a result must not depend on


def calls(device: Device) -> Answer:
    """One accumulator in L0C, however k is cut into calls."""
    a, b = operands()
    whole = device.mmad(a, b)
    return all_hold([compare(device.mmad(a, b, call_k=call_k), whole, f"calls of {call_k}") for call_k in (16, 48, 128)])


def rows(device: Device) -> Answer:
    a, b = operands()
    whole, turned = device.mmad(a, b), torch.arange(TILE).roll(37)
    answers = [compare(device.mmad(a[turned], b), whole[turned], "rows at other places")]
    answers += [compare(device.mmad(a[-m:], b), whole[-m:], f"the last {m} rows alone") for m in (32, 64)]
    return all_hold(answers)


def columns(device: Device) -> Answer:
    a, b = operands()
    whole, turned = device.mmad(a, b), torch.arange(TILE).roll(37)
    answers = [compare(device.mmad(a, b[turned]), whole[:, turned], "columns at other places")]
    answers += [compare(device.mmad(a, b[-n:]), whole[:, -n:], f"the last {n} columns alone") for n in (16, 32, 64)]
    return all_hold(answers)


def lone_row(device: Device) -> Answer:
    a, b = operands()
    whole = device.mmad(a, b)
    return all_hold([compare(device.mmad(pad_rows(a[row : row + 1]), b)[:1], whole[row : row + 1], f"row {row} alone") for row in (0, 77)])


def gemv(device: Device) -> Answer:
    """With m = 1 the fractal of L0A that any other m reads is read as something else."""
    a, b = operands(m=FRACTAL)
    padded = device.mmad(a, b)[:1]
    try:
        found = device.mmad(a, b, m=1)
    except RuntimeError as error:
        return Answer(True, f"m = 1 is refused: {str(error).splitlines()[0]}", "refused")
    if compare(found, padded, "m = 1").holds:
        return Answer(False, "m = 1 has the bits of a padded row: padding is not needed", "equal")
    return Answer(True, "m = 1 gives something else", "different")


def beyond_k(device: Device) -> Answer:
    """NaN beyond k in both operands does not enter."""
    answers = []
    for k in (5, FRACTAL + 8, 70):
        a, b = operands(k=96)
        expected = device.mmad(zero_beyond(a, k), zero_beyond(b, k))
        a[:, k:], b[:, k:] = torch.nan, torch.nan
        answers.append(compare(device.mmad(a, b, k=k), expected, f"k = {k}"))
    return all_hold(answers)


def zero_beyond(x: torch.Tensor, k: int) -> torch.Tensor:
    return torch.cat([x[:, :k], torch.zeros_like(x[:, k:])], dim=1)


def cores(device: Device) -> Answer:
    a, b = operands()
    copies = device.mmad(a, b, blocks=BLOCKS)
    return compare(copies, copies[:1].expand_as(copies).contiguous(), "Mmad on another core")


# ---- subnormals


def subnormals(device: Device) -> Answer:
    """Of operands, of products, of sums; in both types."""

    def product(left: float, right: float, dtype: torch.dtype = torch.bfloat16) -> float:
        a, b = torch.zeros(FRACTAL, FRACTAL, dtype=dtype), torch.zeros(FRACTAL, FRACTAL, dtype=dtype)
        a[:, 0], b[:, 0] = left, right
        return device.mmad(a, b)[0, 0].item()

    return combined({
        "operand, bf16": (product(2.0**-130, 2.0**100), 2.0**-30),
        "operand, fp16": (product(2.0**-20, 1.0, torch.float16), 2.0**-20),
        "product": (product(2.0**-70, 2.0**-70), 2.0**-140),
        "operand and result": (product(2.0**-130, 1.0), 2.0**-130),
    })  # fmt: skip


QUESTIONS = (
    Question("mmad_order", f"Mmad adds along k in one of the orders {MMAD_ORDERS}", "promise", mmad_order),
    Question("mmad_calls", "how k is cut into calls does not show: L0C goes on where it was", "promise", calls),
    Question("mmad_rows", "a row does not depend on its place, on its neighbours, or on how many there are", "promise", rows),
    Question("mmad_columns", "a column does not depend on its place, on its neighbours, or on how many there are", "promise", columns),
    Question("mmad_lone_row", "a single row, padded to 16, has the bits that it has among many", "promise", lone_row),
    Question("mmad_gemv", "m = 1 reads L0A in another layout (GEMV mode), so that rows must be padded", "note", gemv),
    Question("mmad_beyond_k", "what L0A and L0B hold beyond k takes no part", "promise", beyond_k),
    Question("mmad_cores", "every cube core computes the same bits", "promise", cores),
    Question("mmad_subnormals", "Mmad keeps subnormal operands, products and sums", "promise", subnormals),
)
