// Native twins of exp, log and row_sum (reference/elementary.py, reference/sums.py).
#include "elementary_tiling.h"
#include "native_call.h"
#include "parallel.h"
#include "row_sums.h"

namespace megatron_ext {
namespace {

constexpr double kWorkOfFunction = 16, kWorkOfTerm = 2;  // an element costs about as much as so many multiply-adds of a contraction

template <float (*function)(float)>
void elementwise(const KernelCall& call, const ElementwiseTiling& tiling) {
    const float* x = static_cast<const float*>(call.operands[0]);
    float* y = static_cast<float*>(call.operands[1]);
    parallel_ranges(tiling.size, call.threads, kWorkOfFunction * tiling.size, [=](Index first, Index last) {
#pragma GCC ivdep
        for (Index i = first; i < last; ++i) y[i] = function(x[i]);
    });
}

// Rows that come from memory: processors fetch ahead too late for so little work on each element.
inline void fetch_ahead(const float* terms) {
    constexpr Index kAhead = 1024, kLine = 16;  // 4 KB, measured
    for (Index i = 0; i < kTogether * kLanes; i += kLine) __builtin_prefetch(terms + kAhead + i);
}

inline float sum_of_row(const float* x, Index width) {
    const Index whole = width / kRowSumBlock * kRowSumBlock;
    const float total = sum_of_blocks(whole, [x](Index i, Lanes* v) {
        fetch_ahead(x + i);
        for (Index j = 0; j < kTogether; ++j) v[j] = load(x + i + j * kLanes);
    });
    if (whole == width) return total;
    float tail[kRowSumBlock] = {};
    std::copy_n(x + whole, width - whole, tail);
    return total + block_sum(tail);
}

void row_sums(const KernelCall& call, const RowSumTiling& tiling) {
    const float* x = static_cast<const float*>(call.operands[0]);
    float* sums = static_cast<float*>(call.operands[1]);
    parallel_ranges(tiling.rows, call.threads, kWorkOfTerm * tiling.rows * tiling.width, [=](Index first, Index last) {
        for (Index row = first; row < last; ++row) sums[row] = sum_of_row(x + row * tiling.width, tiling.width);
    });
}

}  // namespace
}  // namespace megatron_ext

MEGATRON_EXT_NATIVE(exp_f32, megatron_ext::ElementwiseTiling, megatron_ext::elementwise<megatron_ext::exp_f32>)
MEGATRON_EXT_NATIVE(log_f32, megatron_ext::ElementwiseTiling, megatron_ext::elementwise<megatron_ext::log_f32>)
MEGATRON_EXT_NATIVE(row_sum_f32, megatron_ext::RowSumTiling, megatron_ext::row_sums)
