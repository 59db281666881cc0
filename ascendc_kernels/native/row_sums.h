// row_sum of sums.h for long rows: a block of 64 is eight vectors of eight, and the trees of eight blocks are computed together.
#pragma once
#include "sums.h"

namespace megatron_ext {

typedef int32_t IntLanes __attribute__((vector_size(32), aligned(4), may_alias));
constexpr Index kTogether = 4;  // vectors that step together: one by one, each would wait for its own chain of operations
static_assert(kRowSumBlock == kLanes * kLanes, "a block is eight vectors of eight lanes");

inline Lanes splat(float x) { return Lanes{x, x, x, x, x, x, x, x}; }

// Sums of neighbours, of a and of b in turn inside each half of the lanes: shuffles across the halves cost more.
inline Lanes neighbour_sums(Lanes a, Lanes b) {
    return __builtin_shuffle(a, b, IntLanes{0, 2, 8, 10, 4, 6, 12, 14}) + __builtin_shuffle(a, b, IntLanes{1, 3, 9, 11, 5, 7, 13, 15});
}

// Lane i: the tree over the lanes of v[i].
inline Lanes lane_trees(const Lanes* v) {
    const Lanes low = neighbour_sums(neighbour_sums(v[0], v[1]), neighbour_sums(v[2], v[3]));
    const Lanes high = neighbour_sums(neighbour_sums(v[4], v[5]), neighbour_sums(v[6], v[7]));
    return __builtin_shuffle(low, high, IntLanes{0, 1, 2, 3, 8, 9, 10, 11}) + __builtin_shuffle(low, high, IntLanes{4, 5, 6, 7, 12, 13, 14, 15});
}

// The first three levels of the tree of a block. get(i, v) puts its terms i to i + 32 into the vectors v[0 .. 4).
template <typename Get>
inline Lanes vector_trees(Index first, Get get) {
    Lanes v[kLanes];
    for (Index i = 0; i < kLanes; i += kTogether) get(first + i * kLanes, v + i);
    return lane_trees(v);
}

inline float lane_tree(Lanes t) { return ((t[0] + t[1]) + (t[2] + t[3])) + ((t[4] + t[5]) + (t[6] + t[7])); }

// The sum of the block of 64 at `terms`.
inline float block_sum(const float* terms) {
    return lane_tree(vector_trees(0, [=](Index i, Lanes* v) {
        for (Index j = 0; j < kTogether; ++j) v[j] = load(terms + i + j * kLanes);
    }));
}

// row_sum of n terms, n a multiple of 64; get as above.
template <typename Get>
inline float sum_of_blocks(Index n, Get get) {
    constexpr Index kGroup = kLanes * kRowSumBlock;
    float total = 0.0f;
    Index first = 0;
    for (; first + kGroup <= n; first += kGroup) {
        Lanes trees[kLanes];
        for (Index b = 0; b < kLanes; ++b) trees[b] = vector_trees(first + b * kRowSumBlock, get);
        const Lanes sums = lane_trees(trees);
        for (Index b = 0; b < kLanes; ++b) total = total + sums[b];
    }
    for (; first < n; first += kRowSumBlock) total = total + lane_tree(vector_trees(first, get));
    return total;
}

}  // namespace megatron_ext
