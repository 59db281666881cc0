"""Fixtures of the operators' own tests: every implementation of equal bits in turn."""

import itertools
import pathlib
import sys

import pytest
import torch

from ascendc_kernels import library
from megatron_ext.reduction_order import MMAD_ORDERS

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests"))  # inputs.py

library.load()  # registers torch.ops.megatron_ext, which test modules name
VARIANTS = library.runnable_variants()
# The checked flavour watches bounds, poison and hazards of the Ascend C kernels; it has no vector code of its own, so one variant is enough.
IMPLEMENTATIONS = [*itertools.product(("model", "native"), ("fast",), VARIANTS), ("model", "checked", "portable")]


def use(implementation: tuple[str, str, str]) -> None:
    path, flavour, variant = implementation
    library.use(variant, flavour, path)


@pytest.fixture(params=IMPLEMENTATIONS, ids="-".join)
def implementation(request):
    """Every test that asks for it runs on the Ascend C kernels (fast and checked) and on their native twins, AVX2 and portable."""
    use(request.param)
    yield request.param
    library.use(VARIANTS[0])


@pytest.fixture(params=["model", "native"])
def threaded(request):
    """threaded(f): results of f() with 1, 2 and 4 threads of torch."""

    def run(function):
        before, results = torch.get_num_threads(), {}
        library.use(VARIANTS[0], path=request.param)
        try:
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                results[threads] = function()
        finally:
            torch.set_num_threads(before)
            library.use(VARIANTS[0])
        return results

    return run


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param


@pytest.fixture(params=MMAD_ORDERS)
def mmad_order(request):
    """Name of an order inside a fractal; operators take its index in MMAD_ORDERS."""
    return request.param
