// Eight fp32 lanes and what the vector functions need of them, in the vector extensions of the compiler: one source for every variant.
#pragma once
#include "kernel_types.h"
#include "sums.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace ascendc_host {

using megatron_ext::Lanes;  // of float
constexpr uint32_t kLanes = uint32_t(megatron_ext::kLanes);
typedef int32_t IntLanes __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t UintLanes __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t ShortLanes __attribute__((vector_size(16), aligned(2), may_alias));  // eight, like the others

inline Lanes all_lanes(float x) { return Lanes{x, x, x, x, x, x, x, x}; }

// A scalar for an operation whose other operand is lanes, or a scalar too.
template <typename T>
inline T spread_like(const T&, T scalar) { return scalar; }
inline Lanes spread_like(const Lanes&, float scalar) { return all_lanes(scalar); }

// ---- 16-bit floats, with the bits of megatron_ext::to_float and from_float

inline Lanes widen_half(ShortLanes stored) {
    const UintLanes bits = __builtin_convertvector(stored, UintLanes), magnitude = bits & 0x7FFF;
    const Lanes moved = Lanes(magnitude << 13) * 0x1p112f;  // exact: it only moves the exponent bias
    const UintLanes special = UintLanes(IntLanes(magnitude) > 0x7BFF) & 0x7F800000;
    return Lanes(UintLanes(moved) | special | (bits ^ magnitude) << 16);
}

inline ShortLanes narrow_half(Lanes x) {
    constexpr int32_t kInfinity = 0x7F800000, kOverflow = 0x47800000, kSmallestNormal = 0x38800000;
    const UintLanes bits = UintLanes(x);
    const IntLanes magnitude = IntLanes(bits & 0x7FFFFFFF);
    const IntLanes bounded = magnitude < kOverflow ? magnitude : kOverflow - IntLanes{};
    const IntLanes normal = (bounded + (bounded >> 13 & 1) + (0xFFF - 0x38000000)) >> 13;
    const IntLanes subnormal = IntLanes(Lanes(magnitude) + 0.5f) - 0x3F000000;  // the addition rounds, ties to even
    IntLanes result = magnitude < kSmallestNormal ? subnormal : normal;
    result = magnitude > kInfinity ? 0x7E00 - IntLanes{} : result;
    return __builtin_convertvector(UintLanes(result) | (bits >> 16 & 0x8000), ShortLanes);
}

inline Lanes load_wide(const float* from) { return megatron_ext::load(from); }
inline Lanes load_wide(const half* from) { return widen_half(*reinterpret_cast<const ShortLanes*>(from)); }
inline Lanes load_wide(const bfloat16_t* from) {
    return Lanes(__builtin_convertvector(*reinterpret_cast<const ShortLanes*>(from), UintLanes) << 16);
}
inline void store_narrow(float* to, Lanes value) { megatron_ext::store(to, value); }
inline void store_narrow(half* to, Lanes value) { *reinterpret_cast<ShortLanes*>(to) = narrow_half(value); }

// ---- masks: all bits of a lane, or none

// Bit i: lane i.
inline uint32_t lane_bits(IntLanes mask) {
#ifdef __AVX2__
    return uint32_t(_mm256_movemask_ps(__m256(mask)));
#else
    uint32_t bits = 0;
    for (uint32_t i = 0; i < kLanes; ++i) bits |= uint32_t(mask[i] & 1) << i;
    return bits;
#endif
}

inline IntLanes lanes_of(uint32_t bits) {
    const IntLanes bit = {1, 2, 4, 8, 16, 32, 64, 128};
    return (int32_t(bits) & bit) != 0;
}
inline ShortLanes short_lanes_of(uint32_t bits) {
    const ShortLanes bit = {1, 2, 4, 8, 16, 32, 64, 128};
    return ShortLanes((uint16_t(bits) & bit) != 0);
}

// ---- trees of adjacent pairs

// [op(a0, a1), op(a2, a3), op(b0, b1), op(b2, b3), op(a4, a5), op(a6, a7), op(b4, b5), op(b6, b7)]
template <typename Op>
inline Lanes combine_pairs(Lanes a, Lanes b, Op op) {
    const IntLanes even = {0, 2, 8, 10, 4, 6, 12, 14}, odd = {1, 3, 9, 11, 5, 7, 13, 15};
    return op(__builtin_shuffle(a, b, even), __builtin_shuffle(a, b, odd));
}

// Lane i of the result: the eight lanes of rows[i], combined in a tree of adjacent pairs with the earlier lane as first operand.
template <typename Op>
inline __attribute__((always_inline)) Lanes pair_trees(const Lanes rows[8], Op op) {
    Lanes quads[2];
    for (int q = 0; q < 2; ++q) {
        const Lanes* row = rows + 4 * q;
        quads[q] = combine_pairs(combine_pairs(row[0], row[1], op), combine_pairs(row[2], row[3], op), op);
    }
    const IntLanes low = {0, 1, 2, 3, 8, 9, 10, 11}, high = {4, 5, 6, 7, 12, 13, 14, 15};
    return op(__builtin_shuffle(quads[0], quads[1], low), __builtin_shuffle(quads[0], quads[1], high));
}

}  // namespace ascendc_host
