"""Both kernels behind `ops`, both orders inside a fractal."""

import pytest
import torch

from ascendc_kernels import build, library
from megatron_ext import ops
from megatron_ext.ops import backend
from megatron_ext.reduction_order import MMAD_ORDERS, ReductionOrder


@pytest.fixture(params=MMAD_ORDERS)
def order(request):
    return ReductionOrder(mmad_order=request.param)


@pytest.fixture(params=sorted(build.VARIANT_FLAGS))
def variant(request, monkeypatch):
    """Each compiled variant in turn: AVX2 and portable must give the same bits."""
    if request.param not in library.runnable_variants():
        pytest.skip("this CPU has no AVX2")
    monkeypatch.setenv(library.VARIANT_VARIABLE, request.param)
    library.use(request.param)
    yield request.param
    library.use(library.runnable_variants()[0])


@pytest.fixture
def both(order, variant):
    """both(f): results of f() on the kernels and on the reference."""

    def run(function):
        results = []
        for name in ("ascendc", "reference"):
            ops.configure(order, name)
            results.append(function())
        return results

    yield run
    backend._active = None


@pytest.fixture
def configured(order):
    ops.configure(order, "ascendc")
    yield order
    backend._active = None


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param
