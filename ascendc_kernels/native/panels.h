// Panels of the right operand of a contraction: [k][16] in fp32, from a matrix of either orientation.
#pragma once
#include "segments.h"
#include "tiles.h"
#include "widen.h"

namespace megatron_ext {

constexpr Index kLine = 2 * kFractal;  // values of two bytes in a cache line

// Eight columns of Count values of k, column(n) points to the first of column n: more columns side by side often share a cache set and push each
// other out.
template <typename T, Index Count, typename Column>
inline void transpose_columns(Column column, float* panel) {
#ifdef __AVX2__
    for (Index k = 0; k < Count; k += kFractal) {
        const Fractal<T> fractal([&](Index n) { return column(n) + k; });
        for (Index i = 0; i < kFractal; ++i) store(panel + (k + i) * kPanel, fractal[i]);
    }
#else
    float columns[kLanes][Count];
    for (Index n = 0; n < kLanes; ++n) widen<Count>(column(n), columns[n]);
    for (Index k = 0; k < Count; k += kLanes) transpose8(columns[0] + k, Count, panel + k * kPanel, kPanel);
#endif
}

// One value at a time: what is left of a panel.
template <typename T>
inline void pack_rest(const Matrix<T>& b, Index first, Index length, Index n0, Index live, float* panel, Magnitudes& seen) {
    for (Index k = 0; k < length; ++k)
        for (Index n = 0; n < live; ++n) panel[k * kPanel + n] = to_float(*b.at(first + k, n0 + n));
    if (b.k_stride == 1)
        for (Index n = 0; length > 0 && n < live; ++n) seen.add(b.at(first, n0 + n), length);
    else
        for (Index k = 0; k < length; ++k) seen.add(b.at(first + k, n0), live);
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
        const auto eight = [&](Index n) { return [&b, at = b.at(first + k, n0 + n)](Index i) { return at + i * b.n_stride; }; };
        for (; k + kLine <= length; k += kLine)
            for (Index n = 0; n < kPanel; n += kLanes) transpose_columns<T, kLine>(eight(n), panel + k * kPanel + n);
        for (; k + kFractal <= length; k += kFractal)
            for (Index n = 0; n < kPanel; n += kLanes) transpose_columns<T, kFractal>(eight(n), panel + k * kPanel + n);
        for (Index n = 0; n < kPanel; ++n) seen.add(b.at(first, n0 + n), k);
    }
    pack_rest(b, first + k, length - k, n0, live, panel + k * kPanel, seen);
}

}  // namespace megatron_ext
