// Native twins of linear, dgrad and wgrad.
#include "contraction.h"
#include "linear_tiling.h"
#include "native_call.h"
#include "weight_gradient.h"

namespace megatron_ext {
namespace {

template <typename T, bool rounded>
void linear(const KernelCall& call, const LinearTiling& t) {
    const T* b = static_cast<const T*>(call.operands[1]);
    const Matrix<T> matrix = t.b_rows_of_n ? Matrix<T>{b, 1, t.b_stride} : Matrix<T>{b, t.b_stride, 1};
    Contraction<T>(MmadOrder(call.mmad_order), static_cast<const T*>(call.operands[0]), t.a_stride, matrix, t.m,
                   Pieces{t.pieces, t.runs, t.run, t.apart}, Output<T>{call.operands[2], t.n, rounded})
        .run(call.threads);
}

template <typename T>
void linear_wgrad(const KernelCall& call, const LinearWgradTiling& t) {
    const WeightGradient<T> gradient = {MmadOrder(call.mmad_order), static_cast<float*>(call.operands[0]), static_cast<const T*>(call.operands[1]),
                                        static_cast<const T*>(call.operands[2]), t.dy_stride, t.x_stride, t.n, t.k};
    gradient.run(static_cast<const int64_t*>(call.operands[3]), t.sequences, call.threads);
}

}  // namespace
}  // namespace megatron_ext

using namespace megatron_ext;

MEGATRON_EXT_NATIVE(linear_bf16, LinearTiling, linear<BFloat16, true>)
MEGATRON_EXT_NATIVE(linear_f16, LinearTiling, linear<Float16, true>)
MEGATRON_EXT_NATIVE(linear_fp32_bf16, LinearTiling, linear<BFloat16, false>)
MEGATRON_EXT_NATIVE(linear_fp32_f16, LinearTiling, linear<Float16, false>)
MEGATRON_EXT_NATIVE(linear_wgrad_bf16, LinearWgradTiling, linear_wgrad<BFloat16>)
MEGATRON_EXT_NATIVE(linear_wgrad_f16, LinearWgradTiling, linear_wgrad<Float16>)
