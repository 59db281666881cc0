// Tiles of a contraction: c[rows][16] += a[rows][L] x panel[L][16], in either order inside a fractal.
//
// A fused multiply-add stands for multiply and add only where every product is exact, which `Magnitudes` decides from the
// operands themselves: then both round once, at the same place, and give the same bits.
#pragma once
#include <type_traits>

#include "sums.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace megatron_ext {

// Rows computed together: with two registers of 8 lanes for each, and their operands, they fill the 16 registers of AVX2; without it, with four
// registers of 4 lanes for each, those of x86-64. Other processors have 32.
#if defined(__x86_64__) && !defined(__AVX2__)
constexpr Index kTileRows = 3;
#else
constexpr Index kTileRows = 6;
#endif

// Largest and smallest non-zero magnitude of model-dtype values, as their bits without the sign; sixteen candidates of each.
class Magnitudes {
 public:
    template <typename T>
    void add_panel_row(const T* values) {
        const Words bits = *reinterpret_cast<const Words*>(values) & 0x7FFF, less = (bits - 1) & 0x7FFF;  // zero becomes the largest: it counts for nothing
        high_ = bits > high_ ? bits : high_;
        low_minus_one_ = less < low_minus_one_ ? less : low_minus_one_;
    }
    void add_panel_row(const float*) {}

    template <typename T>
    void add(const T* values, Index count) {
        Magnitudes seen = *this;  // in registers
        for (; count >= kPanel; count -= kPanel, values += kPanel) seen.add_panel_row(values);
        T rest[kPanel] = {};
        std::copy_n(values, count, rest);
        if (count) seen.add_panel_row(rest);
        *this = seen;
    }

    uint16_t largest() const {
        int16_t found = 0;
        for (Index i = 0; i < kPanel; ++i) found = std::max<int16_t>(found, high_[i]);
        return uint16_t(found);
    }
    uint16_t smallest() const {
        int16_t found = 0x7FFF;
        for (Index i = 0; i < kPanel; ++i) found = std::min<int16_t>(found, low_minus_one_[i]);
        return uint16_t(found + 1);
    }

 private:
    typedef int16_t Words __attribute__((vector_size(2 * kPanel), aligned(2), may_alias));
    Words high_ = {}, low_minus_one_ = Words{} + 0x7FFF;
};

// T, or for float, whose products are never exact, any type of two bytes.
template <typename T>
using Storage = typename std::conditional<std::is_same<T, float>::value, BFloat16, T>::type;

// The two numbers of it that count.
struct Extremes {
    uint16_t low = 0, high = 0;

    Extremes() = default;
    Extremes(uint16_t smallest, uint16_t largest) : low(smallest), high(largest) {}
    Extremes(const Magnitudes& seen) : low(seen.smallest()), high(seen.largest()) {}
};

// Whether every product of a value of `a` and one of `b` is finite and has all its bits in fp32.
template <typename T>
inline bool products_are_exact(const Extremes& a, const Extremes& b) {
    if (std::is_same<T, float>::value) return false;
    if (a.high == 0 || b.high == 0) return true;
    const auto value = [](uint16_t bits) { return double(to_float(bit_cast<Storage<T>>(bits))); };
    const double highest = value(a.high) * value(b.high), lowest = value(a.low) * value(b.low);
    constexpr double kLowest = std::is_same<T, BFloat16>::value ? 0x1p-134 : 0x1p-128;  // products have 16 or 22 bits, down to 2^-149
    return highest < 0x1p127 && lowest >= kLowest;  // false for infinities and NaN
}

#ifdef __FMA__
constexpr bool kHasFused = true;
struct FusedMultiplyAdd {
    Register operator()(float a, Register b, Register c) const { return Register(_mm256_fmadd_ps(_mm256_set1_ps(a), __m256(b), __m256(c))); }
};
#else
constexpr bool kHasFused = false;
using FusedMultiplyAdd = MultiplyThenAdd;  // never asked for
#endif

template <int Rows>
inline void tile(MmadOrder order, bool exact, const float* a, Index a_stride, const float* panel, Index length, float* c, Index c_stride) {
    if (order == kGroups16)
        contract_block_groups16<Rows>(a, a_stride, panel, length, c, c_stride);
    else if (kHasFused && exact)
        contract_block_sequential<Rows>(a, a_stride, panel, length, c, c_stride, FusedMultiplyAdd{});
    else
        contract_block_sequential<Rows>(a, a_stride, panel, length, c, c_stride);
}

// rows rows, in tiles of nearly equal size: a tile of one or two rows leaves the adders waiting. No order depends on how rows are cut.
inline void tiles(MmadOrder order, bool exact, const float* a, Index a_stride, Index rows, const float* panel, Index length, float* c,
                  Index c_stride) {
    const Index count = (rows + kTileRows - 1) / kTileRows;
    for (Index t = 0; t < count; ++t) {
        const Index first = rows * t / count;
        const float* from = a + first * a_stride;
        float* to = c + first * c_stride;
        switch (rows * (t + 1) / count - first) {
            case 6: tile<6>(order, exact, from, a_stride, panel, length, to, c_stride); break;
            case 5: tile<5>(order, exact, from, a_stride, panel, length, to, c_stride); break;
            case 4: tile<4>(order, exact, from, a_stride, panel, length, to, c_stride); break;
            case 3: tile<3>(order, exact, from, a_stride, panel, length, to, c_stride); break;
            case 2: tile<2>(order, exact, from, a_stride, panel, length, to, c_stride); break;
            default: tile<1>(order, exact, from, a_stride, panel, length, to, c_stride);
        }
    }
}

// Eight rows of eight values, transposed: to[i][j] = from[j][i].
inline void transpose8(const float* from, Index from_stride, float* to, Index to_stride) {
#ifdef __AVX2__
    __m256 r[8], t[8];
    for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from + i * from_stride);
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
#else
    for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 8; ++j) to[i * to_stride + j] = from[j * from_stride + i];
#endif
}

}  // namespace megatron_ext
