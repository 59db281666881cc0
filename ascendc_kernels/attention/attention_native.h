// What the native twins of attention share: packing of 16-bit rows into fp32 panels, row softmax, items over threads.
#pragma once
#include <atomic>
#include <memory>

#include "attention_tiling.h"
#include "native_call.h"
#include "parallel.h"
#include "tiles.h"

namespace megatron_ext {

typedef int32_t IntLanes __attribute__((vector_size(32)));

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

inline Lanes all_lanes(float value) { return Lanes{value, value, value, value, value, value, value, value}; }

// exp_f32 of eight lanes.
inline Lanes exp_lanes(Lanes x) {
    const Lanes above = x > -104.0f ? x : all_lanes(-104.0f);  // NaN too: x itself is returned for it
    const Lanes clamped = above < 89.0f ? above : all_lanes(89.0f);
    const Lanes n = (clamped * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    const Lanes r = (clamped - n * 0.693359375f) - n * -2.12194440054690583e-4f;
    Lanes p = all_lanes(float(1.0 / 5040));
    p = p * r + float(1.0 / 720);
    p = p * r + float(1.0 / 120);
    p = p * r + float(1.0 / 24);
    p = p * r + float(1.0 / 6);
    p = p * r + 0.5f;
    p = (p * (r * r) + r) + 1.0f;
    const IntLanes whole = __builtin_convertvector(n, IntLanes), half = whole >> 1;
    const Lanes result = (p * Lanes((half + 127) << 23)) * Lanes((whole - half + 127) << 23);
    return x == x ? result : x;
}

// Adjacent-pair tree over a block of 64.
inline float block_sum(const float* values) {
#ifdef __AVX2__
    __m256 eight[4];  // lane i of a half: a whole group of four of vectors 2i and 2i + 1
    for (int i = 0; i < 2; ++i) {
        const float* at = values + i * 32;
        const __m256 low = _mm256_hadd_ps(_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8));
        const __m256 high = _mm256_hadd_ps(_mm256_loadu_ps(at + 16), _mm256_loadu_ps(at + 24));
        eight[i] = _mm256_hadd_ps(low, high);
    }
    __m128 sums[2];
    for (int i = 0; i < 2; ++i) sums[i] = _mm_add_ps(_mm256_castps256_ps128(eight[i]), _mm256_extractf128_ps(eight[i], 1));
    const __m128 four = _mm_hadd_ps(sums[0], sums[1]), two = _mm_hadd_ps(four, four);
    return _mm_cvtss_f32(_mm_hadd_ps(two, two));
#else
    float tree[kRowSumBlock];
    std::copy_n(values, kRowSumBlock, tree);
    return pair_tree(tree, kRowSumBlock);
#endif
}

// ---- panels: [n / 16][length][16], zero-padded to `padded` columns or rows

// Two 16-bit values of a lane of 32 bits as fp32.
inline Lanes low_half(IntLanes pairs, BFloat16) { return Lanes(pairs << 16); }
inline Lanes high_half(IntLanes pairs, BFloat16) { return Lanes(pairs & int32_t(0xFFFF0000)); }
inline Lanes widen_half(IntLanes bits) {
    const IntLanes sign = (bits & 0x8000) << 16, magnitude = bits & 0x7FFF;
    const Lanes finite = Lanes(magnitude << 13) * 0x1p112f;
    const IntLanes special = (magnitude & 0x3FF) << 13 | 0x7F800000;
    return Lanes(sign | (magnitude >= 0x7C00 ? special : IntLanes(finite)));
}
inline Lanes low_half(IntLanes pairs, Float16) { return widen_half(pairs & 0xFFFF); }
inline Lanes high_half(IntLanes pairs, Float16) { return widen_half(pairs >> 16 & 0xFFFF); }

// How large the values of a panel are, found while it is packed.
class Sizes {
 public:
#ifdef __AVX2__
    void add(__m256i values) {
        const __m256i bits = _mm256_and_si256(values, mask());
        high_ = _mm256_max_epi16(high_, bits);
        low_ = _mm256_min_epi16(low_, _mm256_and_si256(_mm256_sub_epi16(bits, _mm256_set1_epi16(1)), mask()));  // zero wraps around and counts for nothing
    }
    template <typename T>
    void add(const T* values) {
        add(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)));
    }
    Magnitudes magnitudes() const {
        Magnitudes found;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(found.high), high_);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(found.low_minus_one), low_);
        for (uint16_t& low : found.low_minus_one) low = low == 0x7FFF ? 0xFFFF : low;
        return found;
    }

 private:
    __m256i high_ = _mm256_setzero_si256(), low_ = mask();
    static __m256i mask() { return _mm256_set1_epi16(0x7FFF); }
#else
    template <typename T>
    void add(const T* values) {
        found_.add_panel_row(values);
    }
    Magnitudes magnitudes() const { return found_; }

 private:
    Magnitudes found_;
#endif
};

// rows[8] of 16 values each, from column `at` on -> to[16 columns][16], eight lanes of each.
template <typename T>
inline void transpose_strip(const T* const* rows, Index at, float* to, Sizes& sizes) {
#ifdef __AVX2__
    __m256 r[8], t[8];
    for (int i = 0; i < 8; ++i) {
        const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + at));
        sizes.add(values);
        r[i] = _mm256_castsi256_ps(values);  // lanes of two neighbours, which stay together until they are widened
    }
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
        const IntLanes first = IntLanes(_mm256_permute2f128_ps(r[i], r[i + 4], 0x20)), second = IntLanes(_mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
        store(to + (2 * i) * kPanel, low_half(first, T{}));
        store(to + (2 * i + 1) * kPanel, high_half(first, T{}));
        store(to + (2 * i + 8) * kPanel, low_half(second, T{}));
        store(to + (2 * i + 9) * kPanel, high_half(second, T{}));
    }
#else
    for (Index j = 0; j < kLanes; ++j) sizes.add(rows[j] + at);
    for (Index d = 0; d < kPanel; ++d)
        for (Index j = 0; j < kLanes; ++j) to[d * kPanel + j] = to_float(rows[j][at + d]);
#endif
}

// panel[dim][16] with column j = rows[j].
template <typename T>
inline void pack_transposed(float* panel, const T* const* rows, Index dim, Sizes& sizes) {
    for (Index j = 0; j < kPanel; j += kLanes)
        for (Index d = 0; d < dim; d += kPanel) transpose_strip(rows + j, d, panel + d * kPanel + j, sizes);
}

template <typename T>
inline void widen16(const T* from, float* to) {
#ifdef __AVX2__
    const __m128i* halves = reinterpret_cast<const __m128i*>(from);
    for (int h = 0; h < 2; ++h) store(to + h * kLanes, low_half(IntLanes(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves + h))), T{}));
#else
    for (Index i = 0; i < kPanel; ++i) to[i] = to_float(from[i]);
#endif
}

// panel[length][16] with row k = rows[k], columns [at, at + 16).
template <typename T>
inline void pack_natural(float* panel, const T* const* rows, Index length, Index at, Sizes& sizes) {
    for (Index k = 0; k < length; ++k) {
        sizes.add(rows[k] + at);
        widen16(rows[k] + at, panel + k * kPanel);
    }
}

// All panels: [columns / 16][dim][16] and [dim / 16][length][16].
template <typename T>
inline void pack_all_transposed(float* panels, const T* const* rows, Index columns, Index dim, Sizes& sizes) {
    for (Index j = 0; j < columns; j += kPanel) pack_transposed(panels + j * dim, rows + j, dim, sizes);
}

template <typename T>
inline void pack_all_natural(float* panels, const T* const* rows, Index length, Index dim, Sizes& sizes) {
    for (Index d = 0; d < dim; d += kPanel) pack_natural(panels + d * length, rows, length, d, sizes);
}

// ---- products

// c[rows][16] += a[rows][length] x panel in groups of at most six rows of nearly equal size, so that no group leaves the adders waiting.
inline void balanced_tiles(MmadOrder order, bool exact, const float* a, Index a_stride, Index rows, const float* panel, Index length, float* c,
                           Index c_stride) {
    const Index groups = (rows + kTileRows - 1) / kTileRows;
    for (Index g = 0; g < groups; ++g) {
        const Index first = rows * g / groups, count = rows * (g + 1) / groups - first;
        const float* from = a + first * a_stride;
        float* to = c + first * c_stride;
        switch (count) {
            case 6: tile<6>(order, exact, from, a_stride, panel, length, to, c_stride); break;
            case 5: tile<5>(order, exact, from, a_stride, panel, length, to, c_stride); break;
            case 4: tile<4>(order, exact, from, a_stride, panel, length, to, c_stride); break;
            case 3: tile<3>(order, exact, from, a_stride, panel, length, to, c_stride); break;
            case 2: tile<2>(order, exact, from, a_stride, panel, length, to, c_stride); break;
            default: tile<1>(order, exact, from, a_stride, panel, length, to, c_stride);
        }
    }
}

// c[rows][columns] += a[rows][length] x panels [columns / 16][length][16].
inline void panel_product(MmadOrder order, bool exact, const float* a, Index a_stride, Index rows, const float* panels, Index length, Index columns, float* c,
                          Index c_stride) {
    for (Index n = 0; n < columns; n += kPanel) balanced_tiles(order, exact, a, a_stride, rows, panels + n * length, length, c + n, c_stride);
}

// Magnitudes of fp32 values that were rounded to T, as bits of fp32: the smallest that is not zero, minus one, and the largest.
struct Rounded {
    uint32_t low = ~uint32_t(0), high = 0;

    template <typename T>
    void round(float* values, Index count) {
        uint32_t smallest = low, largest = high;
        for (Index i = 0; i < count; ++i) {
            values[i] = to_float(from_float<T>(values[i]));
            const uint32_t bits = bit_cast<uint32_t>(values[i]) & 0x7FFFFFFF;
            smallest = std::min(smallest, bits - 1);
            largest = std::max(largest, bits);
        }
        low = smallest, high = largest;
    }
    // bfloat16 only: products of halves are exact whatever their sizes.
    Magnitudes magnitudes() const {
        Magnitudes found;
        found.high[0] = uint16_t(high >> 16);
        found.low_minus_one[0] = uint16_t(low >> 16);
        return found;
    }
};

template <typename T>
inline bool products_are_exact(const Rounded& a, const Magnitudes& b) {
    return std::is_same<T, Float16>::value || products_are_exact<T>(a.magnitudes(), b);
}

// ---- visible keys

struct Visible {
    Index first, last;  // keys [first, last)
};

inline Visible visible(const AttentionTiling& tiling, Index position, Index keys) {
    const Index last = tiling.causal ? position + 1 : keys;
    return {tiling.window ? std::max<Index>(0, last - tiling.window) : 0, last};
}

// body(scratch, item) for every item, the first ones first; a scratch per thread.
template <typename Scratch, typename Body>
inline void over_items(Index items, Index threads, double work, Body body) {
    const Index useful = std::max<Index>(1, std::min<Index>({threads, items, Index(work / kWorkPerThread)}));
    std::atomic<Index> next{0};
    parallel_ranges(useful, useful, work, [&](Index, Index) {
        Scratch scratch;
        for (Index item = next++; item < items; item = next++) body(scratch, item);
    });
}

}  // namespace megatron_ext
