// Model-dtype values to fp32, many at a time.
#pragma once
#include <memory>

#include "sums.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace megatron_ext {

// Room that is written before it is read; a vector would fill it with zeros first.
inline std::unique_ptr<float[]> room(Index count) { return std::unique_ptr<float[]>(new float[count]); }

template <Index Count, typename T>
inline void widen(const T* from, float* to) {
    for (Index i = 0; i < Count; ++i) to[i] = to_float(from[i]);
}

template <typename T>
inline void widen(const T* from, Index count, float* to) {
    for (Index i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

#ifdef __AVX2__
// Eight values of two bytes, in the upper (BFloat16) or lower (Float16) halves of 32-bit lanes; the other halves are zero.
inline Lanes lanes_of(BFloat16, __m256i upper) { return Lanes(_mm256_castsi256_ps(upper)); }
inline Lanes lanes_of(Float16, __m256i lower) {
    const __m256i magnitude = _mm256_and_si256(lower, _mm256_set1_epi32(0x7FFF)), sign = _mm256_slli_epi32(_mm256_xor_si256(lower, magnitude), 16);
    const __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 13)), _mm256_set1_ps(0x1p112f));  // exact: see to_float
    const __m256i special = _mm256_and_si256(_mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7BFF)), _mm256_set1_epi32(0x7F800000));
    return Lanes(_mm256_or_ps(value, _mm256_castsi256_ps(_mm256_or_si256(sign, special))));
}

// The lower and the upper halves of 32-bit lanes.
inline Lanes lower_halves(BFloat16 tag, __m256i pairs) { return lanes_of(tag, _mm256_slli_epi32(pairs, 16)); }
inline Lanes upper_halves(BFloat16 tag, __m256i pairs) { return lanes_of(tag, _mm256_and_si256(pairs, _mm256_set1_epi32(int(0xFFFF0000)))); }
inline Lanes lower_halves(Float16 tag, __m256i pairs) { return lanes_of(tag, _mm256_and_si256(pairs, _mm256_set1_epi32(0xFFFF))); }
inline Lanes upper_halves(Float16 tag, __m256i pairs) { return lanes_of(tag, _mm256_srli_epi32(pairs, 16)); }

template <typename T>
inline Lanes widen8(const T* from) {
    return lower_halves(T{}, _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

// Eight rows of sixteen values, row(n) points to row n: lane n of pairs[i] holds values 2 i (lower half) and 2 i + 1 (upper half) of it.
template <typename Row>
inline void transpose_pairs(Row row, __m256i pairs[8]) {
    __m256i r[8], t[8];
    for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row(i)));
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        pairs[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        pairs[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
}
#endif

}  // namespace megatron_ext
