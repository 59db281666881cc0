"""Compiles the test kernels with the host model and calls them."""

from __future__ import annotations

import ctypes
import functools
import pathlib

import torch

from ascendc_kernels.host_model import build
from ascendc_kernels.library import runnable_variants

__all__ = ["BUILD_DIR", "KERNELS", "KernelError", "Library", "build_library", "library", "runnable_variants"]

KERNELS = pathlib.Path(__file__).parent / "kernels"
BUILD_DIR = pathlib.Path(__file__).parent / "build"
# Flavours as the tests build them. The bits of a flavour do not depend on its optimisation level.
OPTIMISE = {"fast": "-O2", "checked": "-O0"}


class Case(ctypes.Structure):
    """struct Case of kernels/harness.h."""

    _fields_ = [
        ("src", ctypes.c_void_p * 3),
        ("dst", ctypes.c_void_p),
        ("src_bytes", ctypes.c_uint32 * 3),
        ("dst_bytes", ctypes.c_uint32),
        ("p", ctypes.c_int64 * 12),
        ("scalar", ctypes.c_double),
    ]


class KernelError(RuntimeError):
    """The text that a launch returned."""


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Library:
    def __init__(self, path: pathlib.Path):
        self.handle = ctypes.CDLL(str(path))

    def run(self, name: str, *arguments) -> None:
        """Tensors go as pointers, ints as int64, C types as they are. Raises KernelError."""
        converted = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                assert argument.is_contiguous()
                argument = ctypes.c_void_p(argument.data_ptr())
            elif isinstance(argument, int):
                argument = ctypes.c_int64(argument)
            converted.append(argument)
        function = getattr(self.handle, name)
        function.restype = ctypes.c_char_p
        error = function(*converted)
        if error is not None:
            raise KernelError(error.decode())

    def vector(self, name: str, sources: list[torch.Tensor], out: torch.Tensor, p: list[int], scalar: float = 0.0) -> torch.Tensor:
        """Runs one VECTOR_CASE on a copy of `out`, whose content is what the instruction finds there."""
        out = out.clone()
        case = Case(dst=out.data_ptr(), dst_bytes=bytes_of(out), scalar=scalar)
        for i, source in enumerate(sources):
            case.src[i], case.src_bytes[i] = source.data_ptr(), bytes_of(source)
        for i, value in enumerate(p):
            case.p[i] = value
        self.run(name, ctypes.byref(case))
        return out


def build_library(source: pathlib.Path, flavour: str, variant: str, optimise: str) -> Library:
    vectorise = ("-ftree-vectorize",) if flavour == "fast" else ()
    return Library(build.build([source], BUILD_DIR, flavour, variant, optimise, "-O0", vectorise))


@functools.cache
def library(source: str, flavour: str, variant: str = "portable") -> Library:
    return build_library(KERNELS / source, flavour, variant, OPTIMISE[flavour])
