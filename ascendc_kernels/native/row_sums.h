// The sum of a block of a row (sums.h: row_sum) in vectors of eight lanes, with the bits of its adjacent-pair tree.
#pragma once
#include "sums.h"

namespace megatron_ext {

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

// The first three levels of the tree of a block.
inline Lanes vector_sums(const float* block) {
    return lane_trees([=](Index i) { return load(block + i * kLanes); });
}

inline float block_sum(const float* block) {
    float sums[kLanes];
    store(sums, vector_sums(block));
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

}  // namespace megatron_ext
