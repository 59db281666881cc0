"""Both kernels behind `ops`, both orders inside a fractal."""

import pytest
import torch

from megatron_ext import ops
from megatron_ext.ops import backend, build, native
from megatron_ext.reduction_order import MMAD_ORDERS, ReductionOrder


@pytest.fixture(params=MMAD_ORDERS)
def order(request):
    return ReductionOrder(mmad_order=request.param)


@pytest.fixture(params=sorted(build.VARIANT_FLAGS))
def native_variant(request, monkeypatch):
    """Each compiled variant in turn: AVX2 and portable must give the same bits."""
    if request.param == "avx2" and native.cpu_variant() != "avx2":
        pytest.skip("this CPU has no AVX2")
    monkeypatch.setenv(native.VARIANT_VARIABLE, request.param)
    native.library.cache_clear()
    yield request.param
    native.library.cache_clear()


@pytest.fixture
def both(order, native_variant):
    """both(f): results of f() on the native kernels and on the reference."""

    def run(function):
        results = []
        for name in ("native", "reference"):
            ops.configure(order, name)
            results.append(function())
        return results

    yield run
    backend._active = None


@pytest.fixture
def configured(order):
    ops.configure(order, "native")
    yield order
    backend._active = None


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param
