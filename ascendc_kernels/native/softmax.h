// What softmax operators share: the maximum of a row, and exponents of what lies below it, in vectors whose lanes are distinct elements.
// The bits are those of exp_f32 and row_sum.
#pragma once
#include "sums.h"

namespace megatron_ext {

typedef int32_t IntLanes __attribute__((vector_size(32), aligned(4), may_alias));
constexpr Index kBlockVectors = kRowSumBlock / kLanes;
static_assert(kRowSumBlock == 64 && kLanes == 8, "block_sums adds eight vectors of eight");

inline Lanes splat(float x) { return Lanes{x, x, x, x, x, x, x, x}; }

// The operations of exp_f32 for x <= 0, -inf and NaN, in place. 2^n is applied as 2^(n + 64), which no such n takes out of the normal
// numbers, so that adding to the exponent is exact, and then 2^-64, which rounds once, as exp_f32 does. Vectors step together: one by
// one, each would wait for its own chain of operations.
template <Index kVectors>
inline void exp_below_zero(Lanes* x) {
    constexpr float kLn2Hi = 0.693359375f, kLn2Lo = -2.12194440054690583e-4f, kLog2E = 1.44269504088896341f;
    constexpr float kRoundShift = 12582912.0f + 64.0f;  // its last bits count whole numbers from 64
    constexpr float kTaylor[] = {float(1.0 / 720), float(1.0 / 120), float(1.0 / 24), float(1.0 / 6), 0.5f};
    Lanes shifted[kVectors], p[kVectors];
    for (Index v = 0; v < kVectors; ++v) x[v] = x[v] < -104.0f ? splat(-104.0f) : x[v];  // false for NaN
    for (Index v = 0; v < kVectors; ++v) shifted[v] = x[v] * kLog2E + kRoundShift;
    for (Index v = 0; v < kVectors; ++v) x[v] = x[v] - (shifted[v] - kRoundShift) * kLn2Hi;
    for (Index v = 0; v < kVectors; ++v) x[v] = x[v] - (shifted[v] - kRoundShift) * kLn2Lo;
    for (Index v = 0; v < kVectors; ++v) p[v] = splat(float(1.0 / 5040));
    for (float coefficient : kTaylor)
        for (Index v = 0; v < kVectors; ++v) p[v] = p[v] * x[v] + coefficient;
    for (Index v = 0; v < kVectors; ++v) p[v] = (p[v] * (x[v] * x[v]) + x[v]) + 1.0f;
    for (Index v = 0; v < kVectors; ++v) x[v] = Lanes(IntLanes(p[v]) + (IntLanes(shifted[v]) << 23)) * 0x1p-64f;
}

// Sums of neighbours: of a, then of b, in each half of the lanes.
inline Lanes pair_sums(Lanes a, Lanes b) {
    return __builtin_shuffle(a, b, IntLanes{0, 2, 8, 10, 4, 6, 12, 14}) + __builtin_shuffle(a, b, IntLanes{1, 3, 9, 11, 5, 7, 13, 15});
}
inline Lanes quad_sums(Lanes a, Lanes b, Lanes c, Lanes d) { return pair_sums(pair_sums(a, b), pair_sums(c, d)); }

// Lane i: the tree over the lanes of v[i].
inline Lanes lane_trees(const Lanes* v) {
    const Lanes first = quad_sums(v[0], v[1], v[2], v[3]), last = quad_sums(v[4], v[5], v[6], v[7]);
    return __builtin_shuffle(first, last, IntLanes{0, 1, 2, 3, 8, 9, 10, 11}) + __builtin_shuffle(first, last, IntLanes{4, 5, 6, 7, 12, 13, 14, 15});
}

// row_sum over n terms: get(i) gives terms i to i + 8, the caller pads with +0 up to whole blocks of 64.
template <typename Get>
inline float padded_row_sum(Index n, Get get) {
    constexpr Index kTogether = 4;
    float total = 0.0f;
    Index first = 0;
    for (; first + kTogether * kRowSumBlock <= n; first += kTogether * kRowSumBlock) {
        Lanes trees[kTogether];
        for (Index b = 0; b < kTogether; ++b) {
            Lanes v[kBlockVectors];
            for (Index i = 0; i < kBlockVectors; i += 4) get(first + b * kRowSumBlock + i * kLanes, v + i);
            trees[b] = lane_trees(v);
        }
        const Lanes halves = quad_sums(trees[0], trees[1], trees[2], trees[3]);
        for (Index b = 0; b < kTogether; ++b) total = total + (halves[b] + halves[b + 4]);
    }
    for (; first < n; first += kRowSumBlock) {
        Lanes v[kBlockVectors];
        for (Index i = 0; i < kBlockVectors; i += 4) get(first + i * kLanes, v + i);
        const Lanes tree = lane_trees(v), halves = quad_sums(tree, tree, tree, tree);
        total = total + (halves[0] + halves[4]);
    }
    return total;
}

// NaN if there is one. n >= 1.
inline float maximum(const float* x, Index n) {
    constexpr Index kTogether = 4;
    Lanes best[kTogether];
    IntLanes bad = {};
    for (Lanes& lane : best) lane = splat(x[0]);
    Index i = 0;
    for (; i + kTogether * kLanes <= n; i += kTogether * kLanes)
        for (Index l = 0; l < kTogether; ++l) {
            const Lanes v = load(x + i + l * kLanes);
            best[l] = best[l] > v ? best[l] : v;
            bad |= v != v;
        }
    float result = x[0];
    for (; i < n; ++i) result = x[i] > result || x[i] != x[i] ? x[i] : result;
    for (const Lanes& lane : best)
        for (Index j = 0; j < kLanes; ++j) result = lane[j] > result ? lane[j] : result;
    for (Index j = 0; j < kLanes; ++j)
        if (bad[j]) result = std::numeric_limits<float>::quiet_NaN();
    return result;
}

}  // namespace megatron_ext
