// Panels of the right operand of a contraction: [k][16] in fp32, from a matrix of either orientation.
#pragma once
#include "segments.h"
#include "tiles.h"
#include "widen.h"

namespace megatron_ext {

// Eight columns of 32 values of k, a cache line each: more columns side by side often share a cache set and push each other out.
template <typename T>
inline void transpose_columns(const T* from, Index stride, float* panel) {
#ifdef __AVX2__
    for (Index k = 0; k < 2 * kFractal; k += kFractal) {
        __m256i pairs[8];
        transpose_pairs(from + k, stride, pairs);
        for (Index i = 0; i < 8; ++i) {
            store(panel + (k + 2 * i) * kPanel, lower_halves(T{}, pairs[i]));
            store(panel + (k + 2 * i + 1) * kPanel, upper_halves(T{}, pairs[i]));
        }
    }
#else
    float columns[kLanes][2 * kFractal];
    for (Index n = 0; n < kLanes; ++n) widen<2 * kFractal>(from + n * stride, columns[n]);
    for (Index k = 0; k < 2 * kFractal; k += kLanes) transpose8(columns[0] + k, 2 * kFractal, panel + k * kPanel, kPanel);
#endif
}

// panel[k][16] for k in [first, first + length), columns [n0, n0 + live) of at most sixteen; zero in the other columns.
template <typename T>
inline void pack_panel(const Matrix<T>& b, Index first, Index length, Index n0, Index live, float* panel, Magnitudes& seen) {
    Index k = 0;
    if (live < kPanel) std::fill(panel, panel + length * kPanel, 0.0f);
    if (live == kPanel && b.n_stride == 1) {
        for (; k < length; ++k) {
            widen<kPanel>(b.at(first + k, n0), panel + k * kPanel);
            seen.add_panel_row(b.at(first + k, n0));
        }
    } else if (live == kPanel) {
        for (; k + 2 * kFractal <= length; k += 2 * kFractal)
            for (Index n = 0; n < kPanel; n += kLanes) transpose_columns(b.at(first + k, n0 + n), b.n_stride, panel + k * kPanel + n);
        for (Index n = 0; n < kPanel; ++n) seen.add(b.at(first, n0 + n), k);
    }
    for (; k < length; ++k)
        for (Index n = 0; n < live; ++n) {
            panel[k * kPanel + n] = to_float(*b.at(first + k, n0 + n));
            seen.add(b.at(first + k, n0 + n), 1);
        }
}

}  // namespace megatron_ext
