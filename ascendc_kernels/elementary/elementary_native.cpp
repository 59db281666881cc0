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

// Lane i: the tree over the eight lanes of get(i).
template <typename Get>
inline Lanes lane_trees(Get get) {
    const Lanes low = neighbour_sums(neighbour_sums(get(0), get(1)), neighbour_sums(get(2), get(3)));
    const Lanes high = neighbour_sums(neighbour_sums(get(4), get(5)), neighbour_sums(get(6), get(7)));
    return __builtin_shuffle(low, high, LaneIndices{0, 1, 2, 3, 8, 9, 10, 11}) + __builtin_shuffle(low, high, LaneIndices{4, 5, 6, 7, 12, 13, 14, 15});
}

// Rows that come from memory: processors fetch ahead too late for so little work on each element.
inline void fetch_ahead(const float* block) {
    constexpr Index kAhead = 1024, kLine = 16;  // 4 KB, measured
    for (Index i = 0; i < kRowSumBlock; i += kLine) __builtin_prefetch(block + kAhead + i);
}

// The first three levels of the tree of a block.
inline Lanes vector_sums(const float* block) {
    return lane_trees([=](Index i) { return load(block + i * kLanes); });
}

inline float block_sum(const float* block) {
    float sums[kLanes];
    store(sums, vector_sums(block));
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// row_sum of sums.h; where there are eight blocks, their last three levels are computed together.
inline float sum_of_row(const float* x, Index width) {
    constexpr Index kBlocks = kLanes * kRowSumBlock;
    float total = 0.0f;
    Index first = 0;
    for (; first + kBlocks <= width; first += kBlocks) {
        for (Index b = 0; b < kLanes; ++b) fetch_ahead(x + first + b * kRowSumBlock);
        const Lanes sums = lane_trees([=](Index b) { return vector_sums(x + first + b * kRowSumBlock); });
        for (Index b = 0; b < kLanes; ++b) total = total + sums[b];
    }
    for (; first + kRowSumBlock <= width; first += kRowSumBlock) total = total + block_sum(x + first);
    if (first == width) return total;
    float padded[kRowSumBlock] = {};
    std::copy_n(x + first, width - first, padded);
    return total + block_sum(padded);
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
