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
inline Lanes widen8(const BFloat16* from) {
    const __m256i values = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return Lanes(_mm256_castsi256_ps(_mm256_slli_epi32(values, 16)));
}
inline Lanes widen8(const Float16* from) { return Lanes(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))); }

// Eight rows of sixteen values, row n at from(n), as they lie in memory.
template <typename From>
inline void load_fractal(From from, __m256i rows[8]) {
    for (Index n = 0; n < 8; ++n) rows[n] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from(n)));
}

// Transposed: fractal[i]: value i of every row, row n in lane n.
template <typename T>
class Fractal;

template <>
class Fractal<BFloat16> {
 public:
    template <typename From>
    explicit Fractal(From from) {
        __m256i r[8], t[8];
        load_fractal(from, r);
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
            pairs_[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
            pairs_[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
        }
    }
    Lanes operator[](Index i) const {
        const __m256i pairs = pairs_[i / 2];
        return Lanes(_mm256_castsi256_ps(i % 2 ? _mm256_and_si256(pairs, _mm256_set1_epi32(int(0xFFFF0000))) : _mm256_slli_epi32(pairs, 16)));
    }

 private:
    __m256i pairs_[8];  // lane n of pairs_[i]: values 2 i (lower half) and 2 i + 1 (upper half) of row n
};

template <>
class Fractal<Float16> {
 public:
    template <typename From>
    explicit Fractal(From from) {
        __m256i r[8], t[8];
        load_fractal(from, r);
        for (int i = 0; i < 8; i += 2) {
            t[i] = _mm256_unpacklo_epi16(r[i], r[i + 1]);
            t[i + 1] = _mm256_unpackhi_epi16(r[i], r[i + 1]);
        }
        for (int i = 0; i < 8; i += 4)
            for (int j = 0; j < 2; ++j) {
                r[i + 2 * j] = _mm256_unpacklo_epi32(t[i + j], t[i + j + 2]);
                r[i + 2 * j + 1] = _mm256_unpackhi_epi32(t[i + j], t[i + j + 2]);
            }
        for (int i = 0; i < 4; ++i) {
            halves_[2 * i] = _mm256_unpacklo_epi64(r[i], r[i + 4]);
            halves_[2 * i + 1] = _mm256_unpackhi_epi64(r[i], r[i + 4]);
        }
    }
    Lanes operator[](Index i) const {
        const __m256i halves = halves_[i % 8];
        return Lanes(_mm256_cvtph_ps(i < 8 ? _mm256_castsi256_si128(halves) : _mm256_extracti128_si256(halves, 1)));
    }

 private:
    __m256i halves_[8];  // value i of all rows in the lower 128 bits, value i + 8 in the upper
};
#endif

}  // namespace megatron_ext
