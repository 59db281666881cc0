"""The hazard mode by mutation: three correct kernels are clean, and each of their flag, barrier and queue calls, deleted, is reported.

All mutants of a kernel are one translation unit (the model's headers are parsed once): namespace mutantN holds the kernel without some lines.
"""

from __future__ import annotations

import functools
import re

import pytest
import torch
from host_library import BUILD_DIR, KERNELS, KernelError, Library, build_library, runnable_variants

SYNCHRONISATION = re.compile(
    r"^.*\b(SetFlag|WaitFlag|PipeBarrier|EnQue|DeQue|AllocTensor|FreeTensor|CrossCoreSetFlag|CrossCoreWaitFlag|SyncAll)\b[^;]*;\s*$"
)
BLOCKS = 2
CORES_SHAPE = (2, 32, 16, 32)  # rounds, m, n, k of cores.cpp
KERNEL_NAMES = ("queues", "flags", "cores")
INTACT: tuple[int, ...] = ()  # line numbers that are deleted


@functools.cache
def source_lines(kernel: str) -> list[str]:
    return (KERNELS / "hazards" / f"{kernel}.cpp").read_text().splitlines()


def lines_with(kernel: str, text: str) -> tuple[int, ...]:
    return tuple(number for number, line in enumerate(source_lines(kernel), 1) if text in line)


def single_calls(kernel: str) -> list[tuple[int, ...]]:
    return [(number,) for number, line in enumerate(source_lines(kernel), 1) if SYNCHRONISATION.match(line)]


def whole_events(kernel: str) -> dict[str, tuple[int, ...]]:
    """All calls of one HardEvent: the flags stay paired, so only the order of accesses can show that they are missing."""
    events = sorted(set(re.findall(r"HardEvent::(\w+)", "\n".join(source_lines(kernel)))))
    return {event: lines_with(kernel, f"HardEvent::{event}>") for event in events}


def all_mutants(kernel: str) -> list[tuple[int, ...]]:
    pairs = [lines_with(kernel, f"({flag});") for flag in (0, 1)] if kernel == "cores" else []
    cross_core = [tuple(n for n in pair if "CrossCore" in source_lines(kernel)[n - 1]) for pair in pairs]
    return [INTACT, *single_calls(kernel), *whole_events(kernel).values(), *cross_core]


def mutant_source(kernel: str, mutants: list[tuple[int, ...]]) -> str:
    lines = ["" if line.startswith("#include") else line for line in source_lines(kernel)]
    parts = ['#include "kernel_operator.h"', '#include "runtime.h"']
    for i, deleted in enumerate(mutants):
        body = "\n".join("" if number in deleted else line for number, line in enumerate(lines, 1))
        parts.append(f'namespace mutant{i} {{\n#line 1 "{kernel}.cpp"\n{body}\n}}')
        parts.append(
            f'extern "C" __attribute__((visibility("default"))) const char* run{i}(GM_ADDR x, GM_ADDR y, GM_ADDR z, int64_t blocks, '
            f'int64_t threads) {{ return ascendc_host::launch({{"{kernel}", blocks, int(threads)}}, [=] {{ mutant{i}::kernel(x, y, z); }}); }}'
        )
    return "\n".join(parts) + "\n"


@functools.cache
def mutants(kernel: str, flavour: str = "checked", variant: str = "portable") -> Library:
    deleted = all_mutants(kernel) if flavour == "checked" else [INTACT]
    source = BUILD_DIR / f"{kernel}_{flavour}_mutants.cpp"
    BUILD_DIR.mkdir(exist_ok=True)
    text = mutant_source(kernel, deleted)
    if not source.exists() or source.read_text() != text:
        source.write_text(text)
    return build_library(source, flavour, variant, "-O0" if flavour == "checked" else "-O1")


def run(kernel: str, deleted: tuple[int, ...] = INTACT, flavour: str = "checked", variant: str = "portable", threads: int = 1):
    generator = torch.Generator().manual_seed(0)
    if kernel == "cores":
        rounds, m, n, k = CORES_SHAPE
        x = torch.randint(-8, 8, (rounds * m * k + n * k,), generator=generator).half()
        y, z = torch.zeros(BLOCKS * m * n), torch.zeros((rounds + 1) * BLOCKS * m * n)
    else:
        x, y, z = torch.randn(2048, generator=generator), torch.randn(2048, generator=generator), torch.zeros(2048)
    blocks = 1 if kernel == "flags" else BLOCKS
    mutants(kernel, flavour, variant).run(f"run{all_mutants(kernel).index(deleted)}", x, y, z, blocks, threads)
    return x, y, z


def expected(kernel: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if kernel == "queues":
        return (x + y) * x
    if kernel == "flags":
        z = torch.zeros(2048)
        z[:768] = x[:768] * y[0] + x[:768]
        z[768:832] = 3.0
        z[769] = y[0]
        return z
    rounds, m, n, k = CORES_SHAPE
    a, b = x[: rounds * m * k].view(rounds, m, k).float(), x[rounds * m * k :].view(n, k).float()
    products = a @ b.T + 1.0  # small integers: exact in any order
    per_block = products[:, None].expand(rounds, BLOCKS, m, n)
    return torch.cat([per_block.flatten(), per_block[0].roll(-1, 0).flatten()])


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
@pytest.mark.parametrize("flavour, variant", [("checked", "portable"), ("fast", runnable_variants()[0])])
def test_the_kernels_are_clean_and_right(kernel, flavour, variant):
    for threads in (1, 2, 4):
        x, y, z = run(kernel, flavour=flavour, variant=variant, threads=threads)
        assert torch.equal(z, expected(kernel, x, y))


def report(kernel: str, deleted: tuple[int, ...]) -> str:
    with pytest.raises(KernelError) as error:
        run(kernel, deleted)
    text = str(error.value)
    assert text.startswith(kernel), "the kernel is named"
    assert re.search(rf"{kernel}\.cpp:\d+", text), "the line is named"
    return text


SINGLE = [(kernel, deleted) for kernel in KERNEL_NAMES for deleted in single_calls(kernel)]


@pytest.mark.parametrize("kernel, deleted", SINGLE, ids=[f"{k}-{d[0]}-{source_lines(k)[d[0] - 1].strip()}" for k, d in SINGLE])
def test_a_deleted_call_is_reported(kernel, deleted):
    text = report(kernel, deleted)
    if "PipeBarrier" in source_lines(kernel)[deleted[0] - 1]:
        assert re.search(r"hazard: .* bytes \[\d+, \d+\) of (UB|L0C) buffer 0 .*; PipeBarrier<PIPE_(V|M)> is missing", text)


EVENTS = [(kernel, event) for kernel in KERNEL_NAMES for event in whole_events(kernel)]


@pytest.mark.parametrize("kernel, event", EVENTS)
def test_a_missing_event_is_found_by_the_order_of_accesses(kernel, event):
    text = report(kernel, whole_events(kernel)[event])
    assert "hazard: pipe" in text and " buffer 0 of " in text, "the buffer is named"
    assert f"SetFlag/WaitFlag<HardEvent::{event}> or a queue step is missing" in text


@pytest.mark.parametrize("flag", [0, 1])
def test_a_missing_flag_between_cores_is_found_by_the_order_of_accesses(flag):
    deleted = all_mutants("cores")[flag - 2]
    assert len(deleted) == 2
    text = report("cores", deleted)
    assert re.search(r"hazard: .* of a global buffer, which .*; that was block 0, (vector core \d|cube core): CrossCoreSetFlag", text)
