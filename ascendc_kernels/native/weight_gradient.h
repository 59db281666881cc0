// Weight gradient of a linear layer on a CPU, with the bits of reference/linear.py: wgrad. For linear layers and for
// the rows of an expert.
//
// The accumulator is read as +0 where it is -0, as the cube core reads it (see ../linear/README.md); no sum is -0 from then on.
#pragma once
#include "panels.h"
#include "parallel.h"

namespace megatron_ext {

// grad[n][k] continues through the rows of dy[rows][n] and x[rows][k]; every sequence starts a new group of 16 rows.
template <typename T>
struct WeightGradient {
    MmadOrder order;
    float* grad;
    const T *dy, *x;
    Index dy_stride, x_stride, n, k;

    // boundaries: sequences + 1 row numbers.
    void run(const int64_t* boundaries, Index sequences, const Threads& threads) const {
        const Index panels = (k + kPanel - 1) / kPanel;
        const double work = double(boundaries[sequences] - boundaries[0]) * n * k;
        parallel_ranges(panels, threads, work, [&](Index first, Index last) { columns(boundaries, sequences, first, last); });
    }

    // Panels [first, last) of the gradient's columns.
    void columns(const int64_t* boundaries, Index sequences, Index first, Index last) const {
        Scratch scratch(first * kPanel, std::min(last * kPanel, k));
        bool started = false;
        for (Index q = 0; q < sequences; ++q)
            for (Index row = boundaries[q]; row < boundaries[q + 1]; row += kRowsTogether) {
                rows(row, std::min<Index>(kRowsTogether, boundaries[q + 1] - row), started, scratch);
                started = true;
            }
    }

 private:
    static constexpr Index kRowsTogether = 256;  // whole groups; a panel of x and the rows of a tile of dy are in the nearest cache
    static constexpr Index kColumns = 48;        // of dy that share a panel

    struct Scratch {
        Scratch(Index first, Index last)
            : k0(first), k1(last), panels(room(round_up(last - first, kPanel) * kRowsTogether)), a(room(kColumns * kRowsTogether)) {}
        Index k0, k1;
        std::unique_ptr<float[]> panels, a;
        float edge[kColumns * kPanel];
    };

    // Columns [k0, k1) of the gradient continue through up to kRowsTogether rows of one sequence.
    void rows(Index first, Index count, bool started, Scratch& scratch) const {
        // No sum is -0, so products of padding add nothing when they are added one by one.
        const Index padded = order == kGroups16 ? round_up(count, kFractal) : count;
        Magnitudes x_seen, dy_seen;
        const Matrix<T> columns = {x + first * x_stride, x_stride, 1};
        for (Index k0 = scratch.k0; k0 < scratch.k1; k0 += kPanel) {
            float* panel = scratch.panels.get() + (k0 - scratch.k0) * padded;
            pack_panel(columns, 0, count, k0, std::min(kPanel, scratch.k1 - k0), panel, x_seen);
            std::fill(panel + count * kPanel, panel + padded * kPanel, 0.0f);
        }
        for (Index r = 0; r < count; ++r) dy_seen.add(dy + (first + r) * dy_stride, n);
        const bool exact = products_are_exact<T>(x_seen, dy_seen);
        for (Index n0 = 0; n0 < n; n0 += kColumns) {
            const Index live = std::min(kColumns, n - n0);
            transposed(dy + first * dy_stride + n0, count, live, padded, scratch.a.get());
            for (Index k0 = scratch.k0; k0 < scratch.k1; k0 += kPanel) block(n0, live, k0, padded, exact, started, scratch);
        }
    }

    // dy[count][live] -> a[live][padded]
    void transposed(const T* from, Index count, Index live, Index padded, float* a) const {
        float wide[kLanes][kColumns];
        for (Index r = 0; r < count; r += kLanes) {
            const Index here = std::min(kLanes, count - r), whole = here == kLanes ? live / kLanes * kLanes : 0;
            for (Index j = 0; j < here; ++j) widen(from + (r + j) * dy_stride, live, wide[j]);
            for (Index i = 0; i < whole; i += kLanes) transpose8(wide[0] + i, kColumns, a + i * padded + r, padded);
            for (Index i = whole; i < live; ++i)
                for (Index j = 0; j < here; ++j) a[i * padded + r + j] = wide[j][i];
        }
        for (Index i = 0; i < live; ++i) std::fill(a + i * padded + count, a + (i + 1) * padded, 0.0f);
    }

    // A panel of the gradient, where it is or, at the edge of a row, in a copy.
    void block(Index n0, Index live, Index k0, Index padded, bool exact, bool started, Scratch& scratch) const {
        const Index width = std::min(kPanel, k - k0);
        float* at = grad + n0 * k + k0;
        if (!started)
            for (Index i = 0; i < live; ++i)
                for (Index j = 0; j < width; ++j) at[i * k + j] = at[i * k + j] + 0.0f;
        const float* panel = scratch.panels.get() + (k0 - scratch.k0) * padded;
        if (width == kPanel) return tiles(order, exact, scratch.a.get(), padded, live, panel, padded, at, k);
        for (Index i = 0; i < live; ++i) std::copy_n(at + i * k, width, scratch.edge + i * kPanel);
        tiles(order, exact, scratch.a.get(), padded, live, panel, padded, scratch.edge, kPanel);
        for (Index i = 0; i < live; ++i) std::copy_n(scratch.edge + i * kPanel, width, at + i * k);
    }
};

}  // namespace megatron_ext
