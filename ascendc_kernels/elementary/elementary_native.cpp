// Native twins of exp, log and row_sum (reference/elementary.py, reference/sums.py).
#include "elementary_tiling.h"
#include "native_call.h"
#include "parallel.h"

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

typedef int32_t LaneIndices __attribute__((vector_size(32)));
static_assert(kRowSumBlock == kLanes * kLanes, "a block is eight vectors of eight lanes");

// Sums of neighbours, of a and of b in turn inside each half of the lanes: shuffles across the halves cost more.
inline Lanes neighbour_sums(Lanes a, Lanes b) {
    return __builtin_shuffle(a, b, LaneIndices{0, 2, 8, 10, 4, 6, 12, 14}) + __builtin_shuffle(a, b, LaneIndices{1, 3, 9, 11, 5, 7, 13, 15});
}

// Lane i: the tree over the eight lanes of v[i].
inline Lanes lane_trees(const Lanes* v) {
    const Lanes low = neighbour_sums(neighbour_sums(v[0], v[1]), neighbour_sums(v[2], v[3]));
    const Lanes high = neighbour_sums(neighbour_sums(v[4], v[5]), neighbour_sums(v[6], v[7]));
    return __builtin_shuffle(low, high, LaneIndices{0, 1, 2, 3, 8, 9, 10, 11}) + __builtin_shuffle(low, high, LaneIndices{4, 5, 6, 7, 12, 13, 14, 15});
}

// The first three levels of a block's tree.
inline Lanes vector_sums(const float* block) {
    Lanes v[kLanes];
    for (Index i = 0; i < kLanes; ++i) v[i] = load(block + i * kLanes);
    return lane_trees(v);
}

// row_sum of sums.h, eight blocks at a time.
inline float sum_of_row(const float* x, Index width) {
    float total = 0.0f;
    for (Index first = 0; first < width; first += kLanes * kRowSumBlock) {
        const Index live = std::min(kLanes, (width - first + kRowSumBlock - 1) / kRowSumBlock);
        Lanes blocks[kLanes] = {};
        for (Index b = 0; b < live; ++b) {
            const Index at = first + b * kRowSumBlock, left = width - at;
            float padded[kRowSumBlock] = {};
            if (left < kRowSumBlock) std::copy_n(x + at, left, padded);
            blocks[b] = vector_sums(left < kRowSumBlock ? padded : x + at);
        }
        const Lanes sums = lane_trees(blocks);
        for (Index b = 0; b < live; ++b) total = total + sums[b];
    }
    return total;
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
