"""The host model, as it is and with one deviation from what it takes for granted."""

import ctypes
import pathlib

import pytest

from ascendc_kernels import build, library
from ascendc_kernels.host_model import build as model_build
from megatron_ext.probe.device import Device, use_model

BUILD_DIR = pathlib.Path(__file__).parent / "build"


@pytest.fixture
def model():
    """model(mmad_order): the host model as a device."""
    use_model()
    yield lambda mmad_order="sequential": Device("model", mmad_order)
    library.use(library.runnable_variants()[0])


@pytest.fixture(scope="session")
def deviating_library():
    """The probe's kernels, and the linear kernel that it uses, on a model that can deviate."""
    sources = [build.ROOT / folder / f"{folder}_kernel.cpp" for folder in ("probe", "linear")]
    path = model_build.build(sources, BUILD_DIR, "fast", "portable", "-O2", extra_flags=["-DASCENDC_HOST_DEVIATIONS"])
    handle = ctypes.CDLL(str(path))
    handle.ascendc_host_deviate.restype = ctypes.c_bool
    handle.ascendc_host_deviations.restype = ctypes.c_char_p
    return path, handle


@pytest.fixture
def deviating(deviating_library):
    """deviating(name): the host model with that deviation."""
    path, handle = deviating_library
    library.load()
    error = library.binding().megatron_ext_use_kernels(str(path).encode(), library.PATHS.index("model"))
    assert error is None, error

    def turn_on(name: str) -> Device:
        assert handle.ascendc_host_deviate(name.encode()), f"the model has no deviation {name}"
        return Device("model")

    yield turn_on
    handle.ascendc_host_deviate(b"none")
    library.use(library.runnable_variants()[0])
