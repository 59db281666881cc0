"""Operators in Ascend C, registered with torch as `torch.ops.megatron_ext.*`. `load()` builds what is out of date and registers them."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib

import torch

from ascendc_kernels import build

# Environment variables, so that engines' worker processes follow; all choices give the same bits.
VARIANT_VARIABLE = "MEGATRON_EXT_KERNEL_VARIANT"  # avx2, portable; default: the best one that this CPU runs
PATH_VARIABLE = "MEGATRON_EXT_KERNEL_PATH"
FLAVOUR_VARIABLE = "MEGATRON_EXT_KERNEL_FLAVOUR"  # fast, checked
# preferred: each operator's own choice. model: the Ascend C kernel on the host model. native: the C++ twin wherever there is one.
PATHS = ("preferred", "model", "native")


def runnable_variants() -> list[str]:
    """Variants that this CPU can run, the best one first."""
    info = pathlib.Path("/proc/cpuinfo")
    flags = info.read_text().split() if info.exists() else []
    has_avx2 = "avx2" in build.VARIANT_FLAGS and {"avx2", "fma", "f16c"} <= set(flags)  # every CPU with AVX2 converts half in hardware
    return ["avx2", "portable"] if has_avx2 else ["portable"]


def chosen(variable: str, choices: list[str] | tuple[str, ...]) -> str:
    """The value of an environment variable, or the first choice. Raises BuildError for anything else."""
    value = os.environ.get(variable, choices[0])
    if value not in choices:
        raise build.BuildError(f"{variable}={value!r}: expected one of {list(choices)}")
    return value


@functools.cache
def binding() -> ctypes.CDLL:
    build.build()
    torch.ops.load_library(str(build.binding_library()))
    library = ctypes.CDLL(str(build.binding_library()))
    library.megatron_ext_use_kernels.restype = ctypes.c_char_p
    return library


def use(variant: str, flavour: str = "fast", path: str = "preferred") -> None:
    """Which kernel library the operators of this process call from now on. Raises BuildError if it cannot be loaded."""
    if flavour != "fast":
        build.build([flavour])
    file = str(build.kernel_library(flavour, variant)).encode()
    error = binding().megatron_ext_use_kernels(file, PATHS.index(path))
    if error is not None:
        raise build.BuildError(f"the kernel library could not be loaded: {error.decode()}")


def use_device(file: pathlib.Path) -> None:
    """Kernels for NPU tensors, from the library that CMakeLists.txt builds. Has not run on a device."""
    device = ctypes.CDLL(str(file))
    device.megatron_ext_device_kernels.restype = ctypes.c_void_p
    binding().megatron_ext_use_device(ctypes.c_void_p(device.megatron_ext_device_kernels()))


@functools.cache
def load() -> None:
    """Registers the operators, with the library that the environment asks for. The second call does nothing."""
    if build.device_library().exists():
        use_device(build.device_library())
    use(
        chosen(VARIANT_VARIABLE, runnable_variants()), chosen(FLAVOUR_VARIABLE, tuple(build.FLAVOUR_FLAGS)), chosen(PATH_VARIABLE, PATHS)
    )  # fmt: skip
