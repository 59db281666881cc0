// Balanced binary tree over neighbouring parts in UB, in fp32.
#pragma once
#include "kernel_operator.h"

namespace megatron_ext {

// `parts` (a power of two) of `count` elements, `stride` apart, level by level: part i takes part i + step, so that the leaves of the tree are
// neighbours. The root is part 0.
__aicore__ inline void AddNeighbours(const AscendC::LocalTensor<float>& tree, int64_t parts, int64_t stride, uint32_t count) {
    for (int64_t step = 1; step < parts; step *= 2) {
        for (int64_t i = 0; i < parts; i += 2 * step) {
            const AscendC::LocalTensor<float> left = tree[uint32_t(i * stride)];
            AscendC::Add(left, left, tree[uint32_t((i + step) * stride)], int32_t(count));
        }
        AscendC::PipeBarrier<PIPE_V>();
    }
}

// One rounding, or a copy that keeps the sign of zero.
template <typename Out>
__aicore__ inline void RoundTo(const AscendC::LocalTensor<Out>& out, const AscendC::LocalTensor<float>& in, uint32_t count) {
    if constexpr (sizeof(Out) == sizeof(float))
        AscendC::Adds(out, in, -0.0f, int32_t(count));
    else
        AscendC::Cast(out, in, AscendC::RoundMode::CAST_RINT, count);
}

}  // namespace megatron_ext
