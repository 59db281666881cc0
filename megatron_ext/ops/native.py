"""ctypes binding of the C++ kernel that no operator of `ascendc_kernels` covers yet, MoE combine. Equal bits to `reference_kernels`."""

from __future__ import annotations

import ctypes
import functools

import torch

from ascendc_kernels import build
from ascendc_kernels import library as kernel_library

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@functools.cache
def open_library(variant: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(build.kernel_library("fast", variant)))


def library() -> ctypes.CDLL:
    """The kernels for this CPU; the environment variable of ascendc_kernels.library overrides the variant (all give the same bits)."""
    return open_library(kernel_library.chosen(kernel_library.VARIANT_VARIABLE, kernel_library.runnable_variants()))


class Pointer:
    """Marks a tensor argument; keeps it alive through the call."""

    def __init__(self, tensor: torch.Tensor | None):
        if tensor is not None and not (tensor.is_contiguous() and tensor.device.type == "cpu"):
            raise ValueError(f"native kernels take contiguous CPU tensors, found strides {tensor.stride()} on {tensor.device}")
        self.tensor = tensor


def call(name: str, *arguments) -> None:
    """Passes tensors as pointers, ints as int64 (dtype and order codes as int32 through ctypes), floats as fp32."""
    converted = []
    for argument in arguments:
        if isinstance(argument, Pointer):
            converted.append(ctypes.c_void_p(argument.tensor.data_ptr() if argument.tensor is not None else None))
        elif isinstance(argument, float):
            converted.append(ctypes.c_float(argument))
        elif isinstance(argument, int):
            converted.append(ctypes.c_int64(argument))
        else:
            converted.append(argument)
    function = getattr(library(), f"megatron_ext_{name}")
    function.restype = ctypes.c_int32
    if function(*converted) != 0:
        raise TypeError(f"native kernel {name} does not know the dtype code {arguments[0].value}")


def dtype_code(dtype: torch.dtype) -> ctypes.c_int32:
    if dtype not in DTYPE_CODES:
        raise TypeError(f"native kernels take {sorted(map(str, DTYPE_CODES))}, found {dtype}")
    return ctypes.c_int32(DTYPE_CODES[dtype])


def combine(y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens, num_experts, segments, expert_range):
    out = torch.empty(num_tokens, y_RH.shape[1])
    call("combine", dtype_code(y_RH.dtype), Pointer(y_RH), Pointer(weights_R), Pointer(token_ids_R), Pointer(expert_ids_R), y_RH.shape[0],
         num_tokens, y_RH.shape[1], num_experts // segments, *expert_range, Pointer(out))  # fmt: skip
    return out
