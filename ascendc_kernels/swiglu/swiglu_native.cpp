// Native twins of the kernels of this folder (reference/activation.py): one pass over memory.
#include "native_call.h"
#include "parallel.h"
#include "swiglu_tiling.h"

namespace megatron_ext {
namespace {

constexpr double kWorkOfElement = 32;  // an element costs about as much as so many multiply-adds of a contraction: exp and divisions

template <typename T>
void swiglu(const KernelCall& call, const SwigluTiling& tiling) {
    const T* gate_up = static_cast<const T*>(call.operands[0]);
    T* a = static_cast<T*>(call.operands[1]);
    const Index width = tiling.width;
    parallel_ranges(tiling.rows, call.threads, kWorkOfElement * tiling.rows * width, [=](Index first, Index last) {
        for (Index row = first; row < last; ++row) {
            const T *gates = gate_up + row * tiling.row_stride, *ups = gates + width;
            T* out = a + row * width;
#pragma GCC ivdep
            for (Index i = 0; i < width; ++i) {
                const float gate = to_float(gates[i]);
                out[i] = from_float<T>(gate / (exp_f32(-gate) + 1.0f) * to_float(ups[i]));
            }
        }
    });
}

template <typename T>
void swiglu_backward(const KernelCall& call, const SwigluTiling& tiling) {
    const T *da = static_cast<const T*>(call.operands[0]), *gate_up = static_cast<const T*>(call.operands[1]);
    T* dgate_up = static_cast<T*>(call.operands[2]);
    const Index width = tiling.width;
    parallel_ranges(tiling.rows, call.threads, 2 * kWorkOfElement * tiling.rows * width, [=](Index first, Index last) {
        for (Index row = first; row < last; ++row) {
            const T *gates = gate_up + row * tiling.row_stride, *ups = gates + width, *upstream = da + row * width;
            T *dgates = dgate_up + row * 2 * width, *dups = dgates + width;
#pragma GCC ivdep
            for (Index i = 0; i < width; ++i) {
                const float gate = to_float(gates[i]), d = to_float(upstream[i]);
                const float denominator = exp_f32(-gate) + 1.0f, sigmoid = 1.0f / denominator;
                dgates[i] = from_float<T>(d * to_float(ups[i]) * (sigmoid * (1.0f + gate * (1.0f - sigmoid))));
                dups[i] = from_float<T>(d * (gate / denominator));
            }
        }
    });
}

}  // namespace
}  // namespace megatron_ext

MEGATRON_EXT_NATIVE(swiglu_bf16, megatron_ext::SwigluTiling, megatron_ext::swiglu<megatron_ext::BFloat16>)
MEGATRON_EXT_NATIVE(swiglu_f16, megatron_ext::SwigluTiling, megatron_ext::swiglu<megatron_ext::Float16>)
MEGATRON_EXT_NATIVE(swiglu_backward_bf16, megatron_ext::SwigluTiling, megatron_ext::swiglu_backward<megatron_ext::BFloat16>)
MEGATRON_EXT_NATIVE(swiglu_backward_f16, megatron_ext::SwigluTiling, megatron_ext::swiglu_backward<megatron_ext::Float16>)
