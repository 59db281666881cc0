"""ctypes binding of the C++ kernels that no operator of `ascendc_kernels` covers yet: attention. Equal bits to `reference_kernels`."""

from __future__ import annotations

import ctypes
import functools

import torch

from ascendc_kernels import build
from ascendc_kernels import library as kernel_library
from megatron_ext.reduction_order import MMAD_ORDERS

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


def order_code(mmad_order: str) -> ctypes.c_int32:
    return ctypes.c_int32(MMAD_ORDERS.index(mmad_order))


def attention(q, k, v, cu_queries, kv_lens, block_tables, scale, kv_tile, mmad_order):
    """k and v: [T, heads, D], or [blocks, page, heads, D] with `block_tables`."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    heads, head_dim = k.shape[-2:]
    max_pages, page = (block_tables.shape[1], k.shape[1]) if block_tables is not None else (0, 0)
    call("attention", dtype_code(q.dtype), order_code(mmad_order), Pointer(q), KeyPointer(k), KeyPointer(v), Pointer(out), Pointer(lse),
         Pointer(cu_queries), Pointer(kv_lens), Pointer(block_tables), len(kv_lens), max_pages, page, k.stride(0), k.stride(-3),
         q.shape[1], heads, head_dim, kv_tile, float(scale))  # fmt: skip
    return out, lse


class KeyPointer(Pointer):
    """Keys and values may have any stride between pages and between rows; a head's row must be dense."""

    def __init__(self, tensor: torch.Tensor):
        if tensor.stride(-1) != 1 or tensor.stride(-2) != tensor.shape[-1]:
            raise ValueError(f"rows of [heads, D] must be dense, found strides {tensor.stride()} for shape {tuple(tensor.shape)}")
        self.tensor = tensor


def attention_backward(do, q, k, v, o, lse, cu_seqlens, scale, kv_tile, mmad_order):
    dq, dk, dv = torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)
    call("attention_backward", dtype_code(q.dtype), order_code(mmad_order), *map(Pointer, (do, q, k, v, o, lse, dq, dk, dv, cu_seqlens)),
         len(cu_seqlens) - 1, q.shape[1], k.shape[1], q.shape[2], kv_tile, float(scale))  # fmt: skip
    return dq, dk, dv
