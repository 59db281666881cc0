// Native twins of grouped_linear, grouped_dgrad and grouped_wgrad_. Threads share the panels of all experts by their cost: one expert may have every row.
#include "contraction.h"
#include "grouped_linear_tiling.h"
#include "native_call.h"
#include "weight_gradient.h"

namespace megatron_ext {
namespace {

// Where every expert's rows begin, and where the last one's end.
std::vector<Index> first_rows(const void* counts, Index experts) {
    std::vector<Index> first(experts + 1, 0);
    for (Index e = 0; e < experts; ++e) first[e + 1] = first[e] + static_cast<const int64_t*>(counts)[e];
    return first;
}

template <typename T, bool rounded>
void grouped_linear(const KernelCall& call, const GroupedLinearTiling& tiling) {
    const LinearTiling& t = tiling.linear;
    const T *a = static_cast<const T*>(call.operands[0]), *b = static_cast<const T*>(call.operands[1]);
    const Output<T> out = {call.operands[3], t.n, rounded};
    const Pieces pieces = {t.pieces, t.runs, t.run, t.apart};
    const std::vector<Index> first = first_rows(call.operands[2], tiling.experts);
    const auto cost = [&](Index e) { return first[e] == first[e + 1] ? 0.0 : work_of_rows(first[e + 1] - first[e]) * kPanel * t.k; };
    parallel_groups(tiling.experts, (t.n + kPanel - 1) / kPanel, call.threads, cost, [&](Index e, Index first_panel, Index last_panel) {
        const T* own = b + e * tiling.b_size;
        const Matrix<T> matrix = t.b_rows_of_n ? Matrix<T>{own, 1, t.b_stride} : Matrix<T>{own, t.b_stride, 1};
        Contraction<T>(MmadOrder(call.mmad_order), a + first[e] * t.a_stride, t.a_stride, matrix, first[e + 1] - first[e], pieces, out.from(first[e]))
            .columns(first_panel, last_panel);
    });
}

template <typename T>
void grouped_linear_wgrad(const KernelCall& call, const GroupedLinearWgradTiling& tiling) {
    const LinearWgradTiling& t = tiling.linear;
    const int64_t *grads = static_cast<const int64_t*>(call.operands[0]), *boundaries = static_cast<const int64_t*>(call.operands[4]);
    const T *dy = static_cast<const T*>(call.operands[1]), *x = static_cast<const T*>(call.operands[2]);
    const std::vector<Index> first = first_rows(call.operands[3], tiling.experts);
    const auto cost = [&](Index e) { return double(first[e + 1] - first[e]) * kPanel * t.n; };
    parallel_groups(tiling.experts, (t.k + kPanel - 1) / kPanel, call.threads, cost, [&](Index e, Index first_panel, Index last_panel) {
        const int64_t* begin = std::lower_bound(boundaries, boundaries + t.sequences, first[e]);
        const int64_t* end = std::lower_bound(begin, boundaries + t.sequences, first[e + 1]);
        const WeightGradient<T> gradient = {MmadOrder(call.mmad_order), reinterpret_cast<float*>(grads[e]), dy, x, t.dy_stride, t.x_stride, t.n, t.k};
        gradient.columns(begin, end - begin, first_panel, last_panel);
    });
}

}  // namespace
}  // namespace megatron_ext

using namespace megatron_ext;

MEGATRON_EXT_NATIVE(grouped_linear_bf16, GroupedLinearTiling, grouped_linear<BFloat16, true>)
MEGATRON_EXT_NATIVE(grouped_linear_f16, GroupedLinearTiling, grouped_linear<Float16, true>)
MEGATRON_EXT_NATIVE(grouped_linear_fp32_bf16, GroupedLinearTiling, grouped_linear<BFloat16, false>)
MEGATRON_EXT_NATIVE(grouped_linear_fp32_f16, GroupedLinearTiling, grouped_linear<Float16, false>)
MEGATRON_EXT_NATIVE(grouped_linear_wgrad_bf16, GroupedLinearWgradTiling, grouped_linear_wgrad<BFloat16>)
MEGATRON_EXT_NATIVE(grouped_linear_wgrad_f16, GroupedLinearWgradTiling, grouped_linear_wgrad<Float16>)
