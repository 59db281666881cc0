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

inline IntLanes extend(ShortLanes stored) {  // with the sign bit
#ifdef __AVX2__
    return IntLanes(_mm256_cvtepi16_epi32(__m128i(stored)));
#else
    typedef int16_t SignedShortLanes __attribute__((vector_size(16)));
    return __builtin_convertvector(SignedShortLanes(stored), IntLanes);
#endif
}

inline ShortLanes truncate(IntLanes values) {  // from 0 to 65535
#ifdef __AVX2__
    const __m256i wide = __m256i(values);
    return ShortLanes(_mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
#else
    return __builtin_convertvector(UintLanes(values), ShortLanes);
#endif
}

inline Lanes widen_half(ShortLanes stored) {
    const IntLanes bits = extend(stored);
    const Lanes moved = Lanes(UintLanes(bits) << 13 & 0x8FFFFFFF) * 0x1p112f;  // exact: it only moves the exponent bias
    const IntLanes special = ((bits & 0x7FFF) > 0x7BFF) & 0x7F800000;
    return Lanes(IntLanes(moved) | special);
}

inline ShortLanes narrow_half(Lanes x) {
    constexpr int32_t kInfinity = 0x7F800000;
    const IntLanes sign = IntLanes(UintLanes(x) & 0x80000000), magnitude = IntLanes(x) & 0x7FFFFFFF;
#ifdef __F16C__
    const IntLanes quiet = sign | 0x7FC00000;  // every NaN becomes this one
    return ShortLanes(_mm256_cvtps_ph(__m256(magnitude > kInfinity ? quiet : IntLanes(x)), _MM_FROUND_TO_NEAREST_INT));
#else
    constexpr int32_t kOverflow = 0x47800000, kSmallestNormal = 0x38800000;
    const IntLanes bounded = magnitude < kOverflow ? magnitude : kOverflow - IntLanes{};
    const IntLanes normal = (bounded + (bounded >> 13 & 1) + (0xFFF - 0x38000000)) >> 13;
    const IntLanes subnormal = IntLanes(Lanes(magnitude) + 0.5f) - 0x3F000000;  // the addition rounds, ties to even
    IntLanes result = magnitude < kSmallestNormal ? subnormal : normal;
    result = magnitude > kInfinity ? 0x7E00 - IntLanes{} : result;
    return truncate(result | IntLanes(UintLanes(sign) >> 16));
#endif
}

inline ShortLanes narrow_bfloat16(Lanes x) {
    const UintLanes bits = UintLanes(x), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return truncate(x != x ? 0x7FC0 - IntLanes{} : IntLanes(rounded));
}

inline Lanes load_wide(const float* from) { return megatron_ext::load(from); }
inline Lanes load_wide(const half* from) { return widen_half(*reinterpret_cast<const ShortLanes*>(from)); }
inline Lanes load_wide(const bfloat16_t* from) {
    return Lanes(UintLanes(extend(*reinterpret_cast<const ShortLanes*>(from))) << 16);
}
inline void store_narrow(float* to, Lanes value) { megatron_ext::store(to, value); }
inline void store_narrow(half* to, Lanes value) { *reinterpret_cast<ShortLanes*>(to) = narrow_half(value); }
inline void store_narrow(bfloat16_t* to, Lanes value) { *reinterpret_cast<ShortLanes*>(to) = narrow_bfloat16(value); }

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

// Lane i of the result: the eight lanes of row(i), combined in a tree of adjacent pairs with the earlier lane as first operand.
template <typename Row, typename Op>
inline __attribute__((always_inline)) Lanes pair_trees(Row row, Op op) {
    const auto quads = [&](int i) { return combine_pairs(combine_pairs(row(i), row(i + 1), op), combine_pairs(row(i + 2), row(i + 3), op), op); };
    const Lanes first = quads(0), second = quads(4);
    const IntLanes low = {0, 1, 2, 3, 8, 9, 10, 11}, high = {4, 5, 6, 7, 12, 13, 14, 15};
    return op(__builtin_shuffle(first, second, low), __builtin_shuffle(first, second, high));
}

}  // namespace ascendc_host
