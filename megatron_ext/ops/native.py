"""ctypes binding of the C++ kernels. Same functions as `reference_kernels`, contiguous CPU tensors, equal bits."""

from __future__ import annotations

import ctypes
import functools

import torch

from ascendc_kernels import build
from ascendc_kernels import library as kernel_library
from megatron_ext.reduction_order import MMAD_ORDERS
from megatron_ext.reference import logprob as reference_logprob
from megatron_ext.reference import router as reference_router
from megatron_ext.reference.linear import gated_rows

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


def contract_segments(a, b, b_k_stride, b_n_stride, k_order, n, segments, mmad_order):
    m, k = a.shape
    out = torch.empty(m, n)
    call("contract_segments", dtype_code(a.dtype), order_code(mmad_order), Pointer(a), Pointer(b), b_k_stride, b_n_stride,
         Pointer(k_order), m, k, n, segments, Pointer(out), torch.get_num_threads())  # fmt: skip
    return out


def linear_fp32(x_MK, w_NK, segments, mmad_order):
    n, k = w_NK.shape
    return contract_segments(x_MK, w_NK, 1, k, None, n, segments, mmad_order)


def dgrad_fp32(dy_MN, w_NK, segments, gated, mmad_order):
    n, k = w_NK.shape
    return contract_segments(dy_MN, w_NK, k, 1, gated_rows(n, segments) if gated else None, k, segments, mmad_order)


def wgrad_(grad_NK, dy_MN, x_MK, boundaries, mmad_order):
    (n, k), cu = grad_NK.shape, torch.tensor(boundaries, dtype=torch.int32)
    call("wgrad", dtype_code(x_MK.dtype), order_code(mmad_order), Pointer(grad_NK), Pointer(dy_MN), Pointer(x_MK), n, k, Pointer(cu),
         len(boundaries) - 1, torch.get_num_threads())  # fmt: skip


def embedding_wgrad_(grad_VH, ids_T, dy_TH):
    call("embedding_wgrad", dtype_code(dy_TH.dtype), Pointer(grad_VH), Pointer(ids_T), Pointer(dy_TH), *dy_TH.shape)


def swiglu(gate_up_TI):
    out = gate_up_TI.new_empty(gate_up_TI.shape[0], gate_up_TI.shape[1] // 2)
    call("swiglu", dtype_code(out.dtype), Pointer(gate_up_TI), Pointer(out), *out.shape)
    return out


def swiglu_backward(da_TI, gate_up_TI):
    out = torch.empty_like(gate_up_TI)
    call("swiglu_backward", dtype_code(out.dtype), Pointer(da_TI), Pointer(gate_up_TI), Pointer(out), *da_TI.shape)
    return out


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


def exp(x):
    x, out = x.contiguous(), torch.empty(x.shape)
    call("exp", Pointer(x), Pointer(out), x.numel())
    return out


def log(x):
    x, out = x.contiguous(), torch.empty(x.shape)
    call("log", Pointer(x), Pointer(out), x.numel())
    return out


def row_sum(x):
    x, out = x.contiguous(), torch.empty(x.shape[:-1])
    call("row_sum", Pointer(x), Pointer(out), out.numel(), x.shape[-1])
    return out


def route(*arguments):
    return reference_router.route(*arguments, exp=exp, row_sum=row_sum)


def route_backward(*arguments):
    return reference_router.route_backward(*arguments, exp=exp, row_sum=row_sum)


def combine(y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens, num_experts, segments, expert_range):
    out = torch.empty(num_tokens, y_RH.shape[1])
    call("combine", dtype_code(y_RH.dtype), Pointer(y_RH), Pointer(weights_R), Pointer(token_ids_R), Pointer(expert_ids_R), y_RH.shape[0],
         num_tokens, y_RH.shape[1], num_experts // segments, *expert_range, Pointer(out))  # fmt: skip
    return out


def vocab_exp_sum(logits_TV, row_max_T, valid, segments):
    out = torch.empty(row_max_T.shape)
    call("vocab_exp_sum", Pointer(logits_TV), Pointer(row_max_T), Pointer(out), *logits_TV.shape, valid, segments)
    return out


def logprob_from_parts(*arguments):
    return reference_logprob.logprob_from_parts(*arguments, log=log)


def vocab_dlogits(*arguments):
    return reference_logprob.vocab_dlogits(*arguments, exp=exp)
