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

// ---- comparisons and choices. Without AVX2 the compiler would take vectors of 32 bytes apart into elements; halves it can compare.

typedef float HalfLanes __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t HalfIntLanes __attribute__((vector_size(16), aligned(4), may_alias));
inline const HalfLanes* halves(const Lanes& x) { return reinterpret_cast<const HalfLanes*>(&x); }
inline const HalfIntLanes* halves(const IntLanes& x) { return reinterpret_cast<const HalfIntLanes*>(&x); }
inline HalfLanes* halves(Lanes& x) { return reinterpret_cast<HalfLanes*>(&x); }
inline HalfIntLanes* halves(IntLanes& x) { return reinterpret_cast<HalfIntLanes*>(&x); }

template <typename V, typename Compare>
inline IntLanes compare_lanes(const V& a, const V& b, Compare compare) {
#ifdef __AVX2__
    return compare(a, b);
#else
    IntLanes result;
    for (int h = 0; h < 2; ++h) halves(result)[h] = compare(halves(a)[h], halves(b)[h]);
    return result;
#endif
}

template <typename T>
inline bool greater(T a, T b) { return a > b; }
inline IntLanes greater(Lanes a, Lanes b) { return compare_lanes(a, b, [](auto x, auto y) { return x > y; }); }
inline IntLanes greater(IntLanes a, IntLanes b) { return compare_lanes(a, b, [](auto x, auto y) { return x > y; }); }
inline IntLanes greater(IntLanes a, int32_t b) { return greater(a, b - IntLanes{}); }
template <typename T>
inline bool is_nan(T x) { return x != x; }
inline IntLanes is_nan(Lanes x) { return compare_lanes(x, x, [](auto y, auto z) { return y != z; }); }

// a where the mask is set. Operands are evaluated either way.
template <typename T>
inline T pick(bool mask, T a, T b) { return mask ? a : b; }
template <typename V>
inline V pick(IntLanes mask, V a, V b) {
#ifdef __AVX2__
    return mask ? a : b;
#else
    return V((mask & IntLanes(a)) | (~mask & IntLanes(b)));
#endif
}

// A scalar for an operation whose other operand is lanes, or a scalar too.
template <typename T>
inline T spread_like(const T&, T scalar) { return scalar; }
inline Lanes spread_like(const Lanes&, float scalar) { return all_lanes(scalar); }

// ---- 16-bit floats, with the bits of megatron_ext::to_float and from_float

inline IntLanes extend(ShortLanes stored) {  // with the sign bit
#ifdef __AVX2__
    return IntLanes(_mm256_cvtepi16_epi32(__m128i(stored)));
#else
    // Each element twice is the element in the upper half, to be moved down.
    const ShortLanes low = {0, 0, 1, 1, 2, 2, 3, 3}, high = {4, 4, 5, 5, 6, 6, 7, 7};
    IntLanes result;
    halves(result)[0] = HalfIntLanes(__builtin_shuffle(stored, low)) >> 16;
    halves(result)[1] = HalfIntLanes(__builtin_shuffle(stored, high)) >> 16;
    return result;
#endif
}

// The lower 16 bits of four and four 32-bit elements.
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
constexpr ShortLanes kLowHalves = {0, 2, 4, 6, 8, 10, 12, 14};
#else
constexpr ShortLanes kLowHalves = {1, 3, 5, 7, 9, 11, 13, 15};
#endif

inline ShortLanes truncate(const IntLanes& values) {  // from 0 to 65535
#ifdef __AVX2__
    const __m256i wide = __m256i(values);
    return ShortLanes(_mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
#else
    return __builtin_shuffle(ShortLanes(halves(values)[0]), ShortLanes(halves(values)[1]), kLowHalves);
#endif
}

inline Lanes widen_half(ShortLanes stored) {
    const IntLanes bits = extend(stored);
    const Lanes moved = Lanes(UintLanes(bits) << 13 & 0x8FFFFFFF) * 0x1p112f;  // exact: it only moves the exponent bias
    const IntLanes special = greater(bits & 0x7FFF, 0x7BFF) & 0x7F800000;
    return Lanes(IntLanes(moved) | special);
}

inline ShortLanes narrow_half(Lanes x) {
    constexpr int32_t kInfinity = 0x7F800000;
    const IntLanes sign = IntLanes(UintLanes(x) & 0x80000000), magnitude = IntLanes(x) & 0x7FFFFFFF;
#ifdef __F16C__
    const IntLanes quiet = sign | 0x7FC00000;  // every NaN becomes this one
    return ShortLanes(_mm256_cvtps_ph(__m256(pick(greater(magnitude, kInfinity), quiet, IntLanes(x))), _MM_FROUND_TO_NEAREST_INT));
#else
    constexpr int32_t kOverflow = 0x47800000, kSmallestNormal = 0x38800000;
    const IntLanes bounded = pick(greater(magnitude, kOverflow), kOverflow - IntLanes{}, magnitude);
    const IntLanes normal = (bounded + (bounded >> 13 & 1) + (0xFFF - 0x38000000)) >> 13;
    const IntLanes subnormal = IntLanes(Lanes(magnitude) + 0.5f) - 0x3F000000;  // the addition rounds, ties to even
    IntLanes result = pick(greater(magnitude, kSmallestNormal - 1), normal, subnormal);
    result = pick(greater(magnitude, kInfinity), 0x7E00 - IntLanes{}, result);
    return truncate(result | IntLanes(UintLanes(sign) >> 16));
#endif
}

inline ShortLanes narrow_bfloat16(Lanes x) {
    const UintLanes bits = UintLanes(x), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return truncate(pick(is_nan(x), 0x7FC0 - IntLanes{}, IntLanes(rounded)));
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
    const IntLanes bit = {1, 2, 4, 8, 16, 32, 64, 128}, chosen = mask & bit;
    for (uint32_t i = 0; i < kLanes; ++i) bits |= uint32_t(chosen[i]);
    return bits;
#endif
}

inline IntLanes lanes_of(uint32_t bits) {
    const IntLanes bit = {1, 2, 4, 8, 16, 32, 64, 128};
    return ~greater(1 - IntLanes{}, int32_t(bits) & bit);
}
inline ShortLanes short_lanes_of(uint32_t bits) {
    const ShortLanes bit = {1, 2, 4, 8, 16, 32, 64, 128};
    return ShortLanes((uint16_t(bits) & bit) != 0);
}

// ---- trees of adjacent pairs

struct TwoLanes {
    Lanes first, second;
};

// The even and the odd lanes of a and b: those of both lower halves, then those of both upper halves.
inline TwoLanes even_and_odd(const Lanes& a, const Lanes& b) {
#ifdef __AVX2__
    const IntLanes even = {0, 2, 8, 10, 4, 6, 12, 14}, odd = {1, 3, 9, 11, 5, 7, 13, 15};
    return {__builtin_shuffle(a, b, even), __builtin_shuffle(a, b, odd)};
#else
    const HalfIntLanes even = {0, 2, 4, 6}, odd = {1, 3, 5, 7};
    TwoLanes result;
    for (int h = 0; h < 2; ++h) {
        halves(result.first)[h] = __builtin_shuffle(halves(a)[h], halves(b)[h], even);
        halves(result.second)[h] = __builtin_shuffle(halves(a)[h], halves(b)[h], odd);
    }
    return result;
#endif
}

// Both lower halves, and both upper ones.
inline TwoLanes lower_and_upper(const Lanes& a, const Lanes& b) {
#ifdef __AVX2__
    const IntLanes lower = {0, 1, 2, 3, 8, 9, 10, 11}, upper = {4, 5, 6, 7, 12, 13, 14, 15};
    return {__builtin_shuffle(a, b, lower), __builtin_shuffle(a, b, upper)};
#else
    TwoLanes result;
    halves(result.first)[0] = halves(a)[0];
    halves(result.first)[1] = halves(b)[0];
    halves(result.second)[0] = halves(a)[1];
    halves(result.second)[1] = halves(b)[1];
    return result;
#endif
}

// The pairs of a and b, in the order of even_and_odd.
template <typename Op>
inline __attribute__((always_inline)) Lanes combine_pairs(const Lanes& a, const Lanes& b, Op op) {
    const TwoLanes pairs = even_and_odd(a, b);
    return op(pairs.first, pairs.second);
}

// Lane i of the result: the eight lanes of row(i), combined in a tree of adjacent pairs with the earlier lane as first operand.
template <typename Row, typename Op>
inline __attribute__((always_inline)) Lanes pair_trees(Row row, Op op) {
    const auto quads = [&](int i) { return combine_pairs(combine_pairs(row(i), row(i + 1), op), combine_pairs(row(i + 2), row(i + 3), op), op); };
    const TwoLanes halves = lower_and_upper(quads(0), quads(4));
    return op(halves.first, halves.second);
}

}  // namespace ascendc_host
