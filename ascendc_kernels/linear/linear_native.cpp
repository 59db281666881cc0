// Contractions in segments: forward, input gradient and weight gradient of a linear layer (reference/linear.py).
#include "dispatch.h"
#include "parallel.h"
#include "tiles.h"

namespace megatron_ext {
namespace {

constexpr Index kBlockRows = 48;  // rows that share a panel while it is in the nearest cache
constexpr Index kLine = 32;       // values of two bytes in a cache line
constexpr Index kGroup = 4;       // panels packed side by side
constexpr Index kFewRows = 4;     // up to here packing is the work, and asking for exact products would cost more than it gains

// b(k, n), addressed through strides and an optional row permutation of k.
template <typename T>
struct Matrix {
    const T* data;
    Index k_stride, n_stride;
    const Index* k_order;  // nullptr: identity

    const T* at(Index k, Index n) const { return data + (k_order ? k_order[k] : k) * k_stride + n * n_stride; }
};

template <Index Count, typename T>
void convert(const T* from, float* to) {
    for (Index i = 0; i < Count; ++i) to[i] = to_float(from[i]);
}

// Count values of each of sixteen rows, a cache line at a time: neighbouring rows often share a cache set and would push it out.
template <Index Count, typename T>
void transpose_panel(const Matrix<T>& b, Index first_k, Index n0, float* panel) {
    float rows[kPanel][Count];
    for (Index n = 0; n < kPanel; ++n) convert<Count>(b.at(first_k, n0 + n), rows[n]);
    for (Index k = 0; k < Count; k += kLanes)
        for (Index n = 0; n < kPanel; n += kLanes) transpose8(rows[n] + k, Count, panel + k * kPanel + n, kPanel);
}

// panel[k][16] for k in [first, first + length), columns [n0, n0 + live); zero elsewhere, up to `padded` rows. seen: nullptr if nobody asks.
template <typename T>
void pack_panel(const Matrix<T>& b, Index first, Index length, Index padded, Index n0, Index live, float* panel, Magnitudes* seen) {
    if (live < kPanel || padded > length) std::fill(panel, panel + padded * kPanel, 0.0f);
    if (live == kPanel && b.n_stride == 1) {
        for (Index k = 0; k < length; ++k) {
            const T* row = b.at(first + k, n0);
            convert<kPanel>(row, panel + k * kPanel);
            if (seen) seen->add_panel_row(row);
        }
    } else if (live == kPanel && b.k_stride == 1 && !b.k_order && length % kLanes == 0) {
        for (Index k = 0; k + kLine <= length; k += kLine) transpose_panel<kLine>(b, first + k, n0, panel + k * kPanel);
        for (Index k = length / kLine * kLine; k < length; k += kLanes) transpose_panel<kLanes>(b, first + k, n0, panel + k * kPanel);
        for (Index n = 0; seen && n < kPanel; ++n) seen->add(b.at(first, n0 + n), length);
    } else {
        for (Index k = 0; k < length; ++k)
            for (Index n = 0; n < live; ++n) {
                panel[k * kPanel + n] = to_float(*b.at(first + k, n0 + n));
                if (seen) seen->add(b.at(first + k, n0 + n), 1);
            }
    }
}

// a [M][K] -> fp32 [M][segments][padded length]
template <typename T>
std::vector<float> split_rows(const T* a, Index m, Index k, Index segments, Index padded, const Index* k_order, Magnitudes& seen) {
    const Index length = k / segments;
    std::vector<float> out(m * segments * padded, 0.0f);
    for (Index row = 0; row < m * segments; ++row) {
        const T* source = a + row * length;
        float* target = out.data() + row * padded;
        for (Index j = 0; j < length; ++j)
            target[j] = to_float(k_order ? a[row / segments * k + k_order[row % segments * length + j]] : source[j]);
    }
    seen.add(a, m * k);
    return out;
}

// Adjacent-pair tree over `count` parts of `size` values; the sum is left in the first.
void join(float* parts, Index count, Index size) {
    for (count /= 2; count > 0; count /= 2)
        for (Index p = 0; p < count; ++p)
            for (Index i = 0; i < size; ++i) parts[p * size + i] = parts[2 * p * size + i] + parts[(2 * p + 1) * size + i];
}

// out[M][N] = tree over segments of a[M][K] x b(k, n)
template <typename T>
struct Contraction {
    MmadOrder order;
    Matrix<T> b;
    Index m, n, segments, length, padded;
    float* out;
    std::vector<float> a;
    Magnitudes a_seen;

    // Columns [16 first, 16 last) of rows [row, row + rows). Panels are packed in groups, so that a row of b is read in whole cache lines.
    void panels(Index first, Index last, Index row, Index rows) const {
        const Index panel_size = segments * padded * kPanel;
        std::vector<float> group(std::min(kGroup, last - first) * panel_size), parts(segments * kBlockRows * kPanel);
        for (Index p = first; p < last; p += kGroup) {
            const Index count = std::min(kGroup, last - p);
            Magnitudes b_seen;
            pack(p, count, group.data(), m > kFewRows ? &b_seen : nullptr);
            const bool exact = m > kFewRows && products_are_exact<T>(a_seen, b_seen);
            for (Index g = 0; g < count; ++g)
                for (Index m0 = row; m0 < row + rows; m0 += kBlockRows)
                    block(m0, std::min(kBlockRows, row + rows - m0), (p + g) * kPanel, group.data() + g * panel_size, exact, parts.data());
        }
    }

    void pack(Index p, Index count, float* group, Magnitudes* seen) const {
        for (Index s = 0; s < segments; ++s) {
            const Index step = b.n_stride == 1 ? kFractal : length;  // along k: rows that are read side by side, or a whole run
            for (Index k = 0; k < length; k += step)
                for (Index g = 0; g < count; ++g) {
                    const Index n0 = (p + g) * kPanel, here = std::min(step, length - k);
                    pack_panel(b, s * length + k, here, round_up(here, kFractal), n0, std::min(kPanel, n - n0),
                               group + ((g * segments + s) * padded + k) * kPanel, seen);
                }
        }
    }

    void block(Index m0, Index rows, Index n0, const float* panel, bool exact, float* parts) const {
        std::fill(parts, parts + segments * rows * kPanel, 0.0f);
        for (Index s = 0; s < segments; ++s)
            tiles(order, exact, a.data() + (m0 * segments + s) * padded, segments * padded, rows, panel + s * padded * kPanel, padded,
                  parts + s * rows * kPanel, kPanel);
        join(parts, segments, rows * kPanel);
        for (Index i = 0; i < rows; ++i) std::copy_n(parts + i * kPanel, std::min(kPanel, n - n0), out + (m0 + i) * n + n0);
    }

    void run(Index threads) const {
        const Index count = (n + kPanel - 1) / kPanel;
        const double work = double(m + 4) * n * length * segments;  // 4: packing a panel costs about as much as four rows
        if (count >= threads)
            parallel_ranges(count, threads, work, [this](Index first, Index last) { panels(first, last, 0, m); });
        else
            parallel_ranges(m, threads, work, [this, count](Index first, Index last) { panels(0, count, first, last - first); });
    }
};

template <typename T>
void contract_segments(MmadOrder order, const T* a, Matrix<T> b, Index m, Index k, Index n, Index segments, float* out, Index threads) {
    const Index length = k / segments, padded = round_up(length, kFractal);
    Contraction<T> contraction{order, b, m, n, segments, length, padded, out, {}, {}};
    contraction.a = split_rows(a, m, k, segments, padded, b.k_order, contraction.a_seen);
    contraction.run(threads);
}

// grad[N][K] continues through the rows of dy[M][N] and x[M][K]; every sequence starts a new block of 16 rows.
template <typename T>
struct WeightGradient {
    MmadOrder order;
    float* grad;
    const T *dy, *x;
    Index n, k;

    // Rows [first, first + rows) of one sequence, columns [k0, k1) of the gradient.
    void sequence(Index first, Index rows, Index k0, Index k1) const {
        const Index padded = round_up(rows, kFractal), panels = (k1 - k0 + kPanel - 1) / kPanel;
        std::vector<float> packed(panels * padded * kPanel), a(kBlockRows * padded), c(kBlockRows * kPanel);
        Magnitudes x_seen, dy_seen;
        const Matrix<T> columns{x + first * k, k, 1, nullptr};
        for (Index p = 0; p < panels; ++p)
            pack_panel(columns, 0, rows, padded, k0 + p * kPanel, std::min(kPanel, k1 - k0 - p * kPanel), packed.data() + p * padded * kPanel, &x_seen);
        dy_seen.add(dy + first * n, rows * n);
        const bool exact = products_are_exact<T>(x_seen, dy_seen);
        for (Index n0 = 0; n0 < n; n0 += kBlockRows) {
            const Index live = std::min(kBlockRows, n - n0);
            transposed(first, rows, n0, live, padded, a.data());
            for (Index p = 0; p < panels; ++p)
                continue_block(n0, live, k0 + p * kPanel, k1, a.data(), padded, packed.data() + p * padded * kPanel, exact, c.data());
        }
    }

    // dy[rows][n0 .. n0 + live) -> a[live][padded rows]
    void transposed(Index first, Index rows, Index n0, Index live, Index padded, float* a) const {
        std::fill(a, a + live * padded, 0.0f);
        for (Index r = 0; r < rows; ++r)
            for (Index i = 0; i < live; ++i) a[i * padded + r] = to_float(dy[(first + r) * n + n0 + i]);
    }

    void continue_block(Index n0, Index rows, Index k0, Index k1, const float* a, Index padded, const float* panel, bool exact, float* c) const {
        const Index live = std::min(kPanel, k1 - k0);
        for (Index i = 0; i < rows; ++i) std::copy_n(grad + (n0 + i) * k + k0, live, c + i * kPanel);
        tiles(order, exact, a, padded, rows, panel, padded, c, kPanel);
        for (Index i = 0; i < rows; ++i) std::copy_n(c + i * kPanel, live, grad + (n0 + i) * k + k0);
    }
};

template <typename T>
void wgrad(const WeightGradient<T>& gradient, const int32_t* boundaries, Index sequences, Index threads) {
    const Index panels = (gradient.k + kPanel - 1) / kPanel;
    const double work = double(boundaries[sequences] - boundaries[0]) * gradient.n * gradient.k;
    parallel_ranges(panels, threads, work, [&](Index first, Index last) {
        for (Index q = 0; q < sequences; ++q)
            gradient.sequence(boundaries[q], boundaries[q + 1] - boundaries[q], first * kPanel, std::min(last * kPanel, gradient.k));
    });
}

}  // namespace
}  // namespace megatron_ext

using namespace megatron_ext;

extern "C" __attribute__((visibility("default"))) int32_t megatron_ext_contract_segments(int32_t dtype, int32_t order, const void* a, const void* b, Index b_k_stride,
                                                  Index b_n_stride, const Index* k_order, Index m, Index k, Index n, Index segments,
                                                  float* out, Index threads) {
    return dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        const Matrix<T> matrix{static_cast<const T*>(b), b_k_stride, b_n_stride, k_order};
        contract_segments(MmadOrder(order), static_cast<const T*>(a), matrix, m, k, n, segments, out, threads);
    });
}

extern "C" __attribute__((visibility("default"))) int32_t megatron_ext_wgrad(int32_t dtype, int32_t order, float* grad, const void* dy, const void* x, Index n, Index k,
                                      const int32_t* boundaries, Index sequences, Index threads) {
    return dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        wgrad(WeightGradient<T>{MmadOrder(order), grad, static_cast<const T*>(dy), static_cast<const T*>(x), n, k}, boundaries, sequences, threads);
    });
}
