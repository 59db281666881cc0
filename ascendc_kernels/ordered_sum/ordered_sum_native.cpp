// Native twin of ordered_sum: no copy of the parts, one pass over memory.
#include "native_call.h"
#include "ordered_sum_tiling.h"
#include "parallel.h"

namespace megatron_ext {
namespace {

constexpr Index kTogether = 256;  // elements whose whole tree stays in the nearest cache

// The subtree over parts [first, first + count) for `size` elements from `at`.
inline void subtree(const float* parts, Index stride, Index first, Index count, Index at, Index size, float* out) {
    if (count == 1) {
        std::copy_n(parts + first * stride + at, size, out);
        return;
    }
    const float *left = parts + first * stride + at, *right = left + stride;
    float room[kTogether];
    if (count > 2) {
        subtree(parts, stride, first, count / 2, at, size, out);
        subtree(parts, stride, first + count / 2, count / 2, at, size, room);
        left = out;
        right = room;
    }
#pragma GCC ivdep
    for (Index i = 0; i < size; ++i) out[i] = left[i] + right[i];
}

template <typename Out>
void ordered_sum(const KernelCall& call, const OrderedSumTiling& tiling) {
    const float* parts = static_cast<const float*>(call.operands[0]);
    Out* sum = static_cast<Out*>(call.operands[1]);
    const Index tiles = (tiling.size + kTogether - 1) / kTogether;
    parallel_ranges(tiles, call.threads, double(tiling.parts) * tiling.size, [&](Index first, Index last) {
        for (Index at = first * kTogether; at < std::min(last * kTogether, tiling.size); at += kTogether) {
            const Index size = std::min(kTogether, tiling.size - at);
            float root[kTogether];
            subtree(parts, tiling.size, 0, tiling.parts, at, size, root);
            for (Index i = 0; i < size; ++i) sum[at + i] = from_float<Out>(root[i]);
        }
    });
}

}  // namespace
}  // namespace megatron_ext

MEGATRON_EXT_NATIVE(ordered_sum_f32, megatron_ext::OrderedSumTiling, megatron_ext::ordered_sum<float>)
MEGATRON_EXT_NATIVE(ordered_sum_bf16, megatron_ext::OrderedSumTiling, megatron_ext::ordered_sum<megatron_ext::BFloat16>)
MEGATRON_EXT_NATIVE(ordered_sum_f16, megatron_ext::OrderedSumTiling, megatron_ext::ordered_sum<megatron_ext::Float16>)
