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

// ---- for ctypes in megatron_ext/ops/native.py, until it calls torch.ops.megatron_ext

extern "C" __attribute__((visibility("default"))) int32_t megatron_ext_contract_segments(int32_t dtype, int32_t order, const void* a, const void* b,
                                                                                         Index b_k_stride, Index b_n_stride, const Index* k_order,
                                                                                         Index m, Index k, Index n, Index segments, float* out,
                                                                                         Index threads) {
    const Index runs = k_order ? 2 : 1;  // the only order that is asked for is that of a gated layer
    const Pieces pieces = {segments, runs, k / segments / runs, k / 2};
    const auto run = [&](auto tag) {
        using T = decltype(tag);
        const Matrix<T> matrix = {static_cast<const T*>(b), b_k_stride, b_n_stride};
        Contraction<T>(MmadOrder(order), static_cast<const T*>(a), k, matrix, m, pieces, Output<T>{out, n, false}).run(threads);
    };
    if (dtype != 1 && dtype != 2) return 1;
    dtype == 1 ? run(BFloat16{}) : run(Float16{});
    return 0;
}

extern "C" __attribute__((visibility("default"))) int32_t megatron_ext_wgrad(int32_t dtype, int32_t order, float* grad, const void* dy, const void* x,
                                                                             Index n, Index k, const int32_t* boundaries, Index sequences,
                                                                             Index threads) {
    const std::vector<int64_t> wide(boundaries, boundaries + sequences + 1);
    const auto run = [&](auto tag) {
        using T = decltype(tag);
        WeightGradient<T>{MmadOrder(order), grad, static_cast<const T*>(dy), static_cast<const T*>(x), n, k, n, k}.run(wide.data(), sequences, threads);
    };
    if (dtype != 1 && dtype != 2) return 1;
    dtype == 1 ? run(BFloat16{}) : run(Float16{});
    return 0;
}
