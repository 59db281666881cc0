"""The hazard mode by mutation: three correct kernels are clean, and each of their flag, barrier and queue calls, deleted, is reported.

All mutants of a kernel are one translation unit (the model's headers are parsed once): namespace mutantN holds the kernel without line N.
"""

from __future__ import annotations

import functools
import pathlib
import re

import pytest
import torch
from host_library import BUILD_DIR, KERNELS, KernelError, Library, runnable_variants

from ascendc_kernels.host_model import build

SYNCHRONISATION = re.compile(
    r"^.*\b(SetFlag|WaitFlag|PipeBarrier|EnQue|DeQue|AllocTensor|FreeTensor|CrossCoreSetFlag|CrossCoreWaitFlag|SyncAll)\b[^;]*;\s*$"
)
INTACT = 0  # lines count from 1
BLOCKS = 2
CORES_SHAPE = (2, 32, 16, 32)  # rounds, m, n, k of cores.cpp


def source_lines(kernel: str) -> list[str]:
    return (KERNELS / "hazards" / f"{kernel}.cpp").read_text().splitlines()


def deletable_lines(kernel: str) -> list[int]:
    return [number for number, line in enumerate(source_lines(kernel), 1) if SYNCHRONISATION.match(line)]


def mutant_source(kernel: str, deleted: list[int]) -> str:
    lines = ["" if line.startswith("#include") else line for line in source_lines(kernel)]
    parts = ['#include "kernel_operator.h"', '#include "runtime.h"']
    for number in deleted:
        body = "\n".join("" if at == number else line for at, line in enumerate(lines, 1))
        parts.append(f'namespace mutant{number} {{\n#line 1 "{kernel}.cpp"\n{body}\n}}')
        parts.append(
            f'extern "C" __attribute__((visibility("default"))) const char* run{number}(GM_ADDR x, GM_ADDR y, GM_ADDR z, int64_t blocks, '
            f'int64_t threads) {{ return ascendc_host::launch({{"{kernel}", blocks, int(threads)}}, [=] {{ mutant{number}::kernel(x, y, z); }}); }}'
        )
    return "\n".join(parts) + "\n"


@functools.cache
def mutants(kernel: str, flavour: str = "checked", variant: str = "portable") -> Library:
    deleted = [INTACT, *deletable_lines(kernel)] if flavour == "checked" else [INTACT]
    source = BUILD_DIR / f"{kernel}_{flavour}_mutants.cpp"
    BUILD_DIR.mkdir(exist_ok=True)
    text = mutant_source(kernel, deleted)
    if not source.exists() or source.read_text() != text:
        source.write_text(text)
    return Library(build.build([source], BUILD_DIR, flavour, variant, "-O0" if flavour == "checked" else "-O1"))


def run(kernel: str, deleted: int = INTACT, flavour: str = "checked", variant: str = "portable", threads: int = 1):
    generator = torch.Generator().manual_seed(0)
    if kernel == "cores":
        rounds, m, n, k = CORES_SHAPE
        x = torch.randint(-8, 8, (rounds * m * k + n * k,), generator=generator).half()
        y, z = torch.zeros(BLOCKS * m * n), torch.zeros((rounds + 1) * BLOCKS * m * n)
    else:
        x, y, z = torch.randn(2048, generator=generator), torch.randn(2048, generator=generator), torch.zeros(2048)
    blocks = 1 if kernel == "flags" else BLOCKS
    mutants(kernel, flavour, variant).run(f"run{deleted}", x, y, z, blocks, threads)
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


@pytest.mark.parametrize("kernel", ["queues", "flags", "cores"])
@pytest.mark.parametrize("flavour, variant", [("checked", "portable"), ("fast", runnable_variants()[0])])
def test_the_kernels_are_clean_and_right(kernel, flavour, variant):
    for threads in (1, 2, 4):
        x, y, z = run(kernel, flavour=flavour, variant=variant, threads=threads)
        assert torch.equal(z, expected(kernel, x, y))


MUTANTS = [(kernel, number) for kernel in ("queues", "flags", "cores") for number in deletable_lines(kernel)]


@pytest.mark.parametrize("kernel, number", MUTANTS, ids=[f"{k}-{n}-{source_lines(k)[n - 1].strip()}" for k, n in MUTANTS])
def test_a_deleted_call_is_reported(kernel, number):
    with pytest.raises(KernelError) as error:
        run(kernel, number)
    text = str(error.value)
    assert text.startswith(kernel), "the kernel is named"
    assert re.search(rf"{kernel}\.cpp:\d+", text), "the line is named"
