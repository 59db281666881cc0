// What the native twins of attention share: panels of rows that lie anywhere, products of rounded values, visible keys, items over threads.
#pragma once
#include <atomic>

#include "attention_tiling.h"
#include "native_call.h"
#include "panels.h"
#include "parallel.h"
#include "softmax.h"

namespace megatron_ext {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Room that grows, and is written before it is read.
class Buffer {
 public:
    void reserve(Index count) {
        if (count > size_) data_ = room(size_ = count);
    }
    float* data() const { return data_.get(); }

 private:
    std::unique_ptr<float[]> data_;
    Index size_ = 0;
};

// ---- panels [n / 16][length][16] of 16-bit rows that lie anywhere

// panel[dim][16] with column j = rows[j].
template <typename T>
inline void pack_transposed(float* panel, const T* const* rows, Index dim, Magnitudes& seen) {
    for (Index j = 0; j < kPanel; j += kLanes)
        for (Index d = 0; d < dim; d += kFractal) {
            const auto column = [&](Index n) { return rows[j + n] + d; };
            transpose_columns<T, kFractal>(column, panel + d * kPanel + j);
            for (Index n = 0; n < kLanes; ++n) seen.add_panel_row(column(n));
        }
}

// Panels [columns / 16][length][16] with row k = rows[k], columns [at, at + columns) of them: those of a cache line together, because rows that lie a
// power of two apart push each other out of the nearest cache before the next panel is packed.
template <typename T>
inline void pack_natural(float* panels, const T* const* rows, Index length, Index at, Index columns, Magnitudes& seen) {
    for (Index k = 0; k < length; ++k)
        for (Index n = 0; n < columns; n += kPanel) {
            widen<kPanel>(rows[k] + at + n, panels + n * length + k * kPanel);
            seen.add_panel_row(rows[k] + at + n);
        }
}

// All panels: [columns / 16][dim][16] and [dim / 16][length][16].
template <typename T>
inline void pack_all_transposed(float* panels, const T* const* rows, Index columns, Index dim, Magnitudes& seen) {
    for (Index j = 0; j < columns; j += kPanel) pack_transposed(panels + j * dim, rows + j, dim, seen);
}

template <typename T>
inline void pack_all_natural(float* panels, const T* const* rows, Index length, Index dim, Magnitudes& seen) {
    for (Index d = 0; d < dim; d += kLine) pack_natural(panels + d * length, rows, length, d, std::min(kLine, dim - d), seen);
}

// ---- products

// Alignment 2, reduce order: one accumulator through k (tiles.h). c[rows][columns] += a[rows][length] x panels [columns / 16][length][16].
inline void panel_product(MmadOrder order, bool exact, const float* a, Index a_stride, Index rows, const float* panels, Index length, Index columns,
                          float* c, Index c_stride) {
    for (Index n = 0; n < columns; n += kPanel) tiles(order, exact, a, a_stride, rows, panels + n * length, length, c + n, c_stride);
}

// Alignment 4, precision: rounds fp32 values to T, nearest even, in place, and remembers how large they are: the smallest that is not zero, minus one,
// and the largest, as bits.
class Rounding {
 public:
    template <typename T>
    void round(float* values, Index count) {
        uint32_t low = low_, high = high_;
        for (Index i = 0; i < count; ++i) {
            values[i] = to_float(from_float<T>(values[i]));
            const uint32_t bits = bit_cast<uint32_t>(values[i]) & 0x7FFFFFFF;
            low = std::min(low, bits - 1);  // zero becomes the largest: it counts for nothing
            high = std::max(high, bits);
        }
        low_ = low, high_ = high;
    }

    // Products of halves are exact whatever their sizes.
    template <typename T>
    bool products_are_exact_with(const Extremes& other) const {
        if (std::is_same<T, Float16>::value) return true;
        return products_are_exact<T>(Extremes(uint16_t((low_ >> 16) + 1), uint16_t(high_ >> 16)), other);
    }

 private:
    uint32_t low_ = ~uint32_t(0), high_ = 0;
};

// ---- visible keys

// Alignment 1, the visible set: keys [first, last) of a row.
struct Visible {
    Index first, last;
};

inline Visible visible(const AttentionTiling& tiling, Index position, Index keys) {
    const Index last = tiling.causal ? position + 1 : keys;
    return {tiling.window ? std::max<Index>(0, last - tiling.window) : 0, last};
}

// body(scratch, item) for every item, the first ones first; a scratch per thread. work: multiply-adds of all items.
template <typename Scratch, typename Body>
inline void over_items(Index items, const Threads& threads, double work, Body body) {
    const Index runners = std::min<Index>(threads.count, items);
    std::atomic<Index> next{0};
    parallel_ranges(runners, threads, work, [&](Index, Index) {
        Scratch scratch;
        for (Index item = next++; item < items; item = next++) body(scratch, item);
    });
}

}  // namespace megatron_ext
