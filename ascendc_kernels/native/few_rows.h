// A contraction in the segment tree for one to four rows, which is bound by reading the weight: values are widened and multiplied where they
// are, without a copy. Needs AVX2; elsewhere `takes` is false.
//
// Products are not fused here: to ask whether they are exact would cost more than it gains.
#pragma once
#include "segments.h"
#include "widen.h"

namespace megatron_ext {

constexpr Index kFewRows = 4;

template <typename T>
struct FewRows {
    MmadOrder order;
    const T* a;
    Index a_stride;
    Matrix<T> b;
    Index m, n;
    Pieces pieces;
    Output<T> out;

    static bool takes(Index m, Index n, const Matrix<T>& b, const Pieces& pieces) {
#ifdef __AVX2__
        return m <= kFewRows && n >= kLanes && (b.n_stride == 1 || pieces.run % kFractal == 0);
#else
        return (void)m, (void)n, (void)b, (void)pieces, false;
#endif
    }

#ifdef __AVX2__
    // Results [first, last) of every row.
    void columns(Index first, Index last) const {
        order == kGroups16 ? columns_in<kGroups16>(first, last) : columns_in<kSequential>(first, last);
    }

 private:
    template <MmadOrder in>
    void columns_in(Index first, Index last) const {
        switch (m) {
            case 1: return b.n_stride == 1 ? streamed<in, 1>(first, last) : transposed<in, 1>(first, last);
            case 2: return b.n_stride == 1 ? streamed<in, 2>(first, last) : transposed<in, 2>(first, last);
            case 3: return b.n_stride == 1 ? streamed<in, 3>(first, last) : transposed<in, 3>(first, last);
            default: return b.n_stride == 1 ? streamed<in, 4>(first, last) : transposed<in, 4>(first, last);
        }
    }

    // rows of a in fp32: [piece][row][k]
    std::unique_ptr<float[]> wide_rows(Index padded) const {
        std::unique_ptr<float[]> wide = room(pieces.count * m * padded);
        for (Index s = 0; s < pieces.count; ++s)
            for (Index i = 0; i < m; ++i) {
                float* to = wide.get() + (s * m + i) * padded;
                for (Index r = 0; r < pieces.runs; ++r) widen(a + i * a_stride + pieces.first(s, r), pieces.run, to + r * pieces.run);
                std::fill(to + pieces.length(), to + padded, 0.0f);
            }
        return wide;
    }

    // sum continues through sixteen products; get(i) gives product i.
    template <MmadOrder in, typename Get>
    static Lanes continued(Lanes sum, Get get) {
        if (in == kSequential) {
#pragma GCC unroll 16
            for (Index i = 0; i < kFractal; ++i) sum = sum + get(i);
            return sum;
        }
        Lanes products[kFractal];
#pragma GCC unroll 16
        for (Index i = 0; i < kFractal; ++i) products[i] = get(i);
        for (Index count = kFractal / 2; count > 0; count /= 2)
            for (Index i = 0; i < count; ++i) products[i] = products[2 * i] + products[2 * i + 1];
        return sum + products[0];
    }

    // ---- columns of b are contiguous: eight columns are turned into lanes, in registers.

    // acc[row] continues through sixteen values of k, which begin at `from` in the first of eight columns.
    template <MmadOrder in, int Rows>
    void add_fractal(const T* from, const float* x, Index x_stride, Lanes* acc) const {
        __m256i pairs[8];
        transpose_pairs(from, b.n_stride, pairs);
        for (int r = 0; r < Rows; ++r)
            acc[r] = continued<in>(acc[r], [&](Index i) {
                return x[r * x_stride + i] * (i % 2 ? upper_halves(T{}, pairs[i / 2]) : lower_halves(T{}, pairs[i / 2]));
            });
    }

    // Chains of additions that run side by side, since each waits for itself: pieces of the same columns, or columns where pieces are few. With four of
    // them, one and two rows were 1.2 to 1.5 times slower: more values than registers, and twice the streams from memory.
    static constexpr Index kChains = 2;
    template <MmadOrder in, int Rows>
    void transposed(Index first, Index last) const {
        const std::unique_ptr<float[]> wide = wide_rows(pieces.length()), parts = room(pieces.count * kChains * Rows * kLanes);
        const Index ways = std::min<Index>(pieces.count, kChains), groups = kChains / ways, part = groups * Rows * kLanes;
        for (Index n0 = first; n0 < last; n0 += groups * kLanes) {
            Index column[kChains];  // of a group; the last ones are computed again rather than cut
            for (Index g = 0; g < groups; ++g) column[g] = std::min(n0 + g * kLanes, n - kLanes);
            for (Index s0 = 0; s0 < pieces.count; s0 += ways) chains<in, Rows>(s0, ways, column, wide.get(), parts.get());
            join(parts.get(), pieces.count, part, part);
            for (Index g = 0; g < groups && n0 + g * kLanes < last; ++g)
                for (Index r = 0; r < Rows; ++r) {
                    const Index skip = std::max<Index>(0, first - column[g]), count = std::min(kLanes, last - column[g]);
                    out.put(r, column[g] + skip, parts.get() + (g * Rows + r) * kLanes + skip, count - skip);
                }
        }
    }

    template <MmadOrder in, int Rows>
    void chains(Index s0, Index ways, const Index* column, const float* wide, float* parts) const {
        const Index length = pieces.length(), groups = kChains / ways;
        Lanes acc[kChains][Rows] = {};
        for (Index r = 0; r < pieces.runs; ++r) {
            const T* from[kChains];
            const float* x[kChains];
            for (int c = 0; c < kChains; ++c) {
                from[c] = b.at(pieces.first(s0 + c % ways, r), column[c / ways]);
                x[c] = wide + (s0 + c % ways) * Rows * length + r * pieces.run;
            }
            for (Index k = 0; k < pieces.run; k += kFractal)
#pragma GCC unroll 4
                for (int c = 0; c < kChains; ++c) {
                    prefetch(from[c], k);
                    add_fractal<in, Rows>(from[c] + k, x[c] + k, length, acc[c]);
                }
        }
        for (int c = 0; c < kChains; ++c)
            for (int r = 0; r < Rows; ++r) store(parts + (((s0 + c % ways) * groups + c / ways) * Rows + r) * kLanes, acc[c][r]);
    }

    // More streams than the hardware follows: the place of the next eight columns is asked for, four at each of the two steps through a cache line.
    // Beyond the matrix the request is dropped.
    void prefetch(const T* from, Index k) const {
        const T* next = from + k + (kLanes + k / kFractal % 2 * 4) * b.n_stride;
        for (Index i = 0; i < 4; ++i) __builtin_prefetch(next + i * b.n_stride, 0, 2);
    }

    // ---- rows of b are contiguous: sixteen of them at a time pass by the accumulators.

    template <MmadOrder in, int Rows>
    void streamed(Index first, Index last) const {
        const Index padded = round_up(pieces.length(), kFractal), width = round_up(last - first, kLanes), part = Rows * width;
        const std::unique_ptr<float[]> wide = wide_rows(padded), parts = room(pieces.count * part);
        const std::vector<T> zeros(width);
        std::fill(parts.get(), parts.get() + pieces.count * part, 0.0f);
        for (Index s = 0; s < pieces.count; ++s)
            for (Index k = 0; k < padded; k += kFractal) {
                const T* row[kFractal];
                for (Index j = 0; j < kFractal; ++j)
                    row[j] = k + j < pieces.length() ? b.at(pieces.first(s, (k + j) / pieces.run) + (k + j) % pieces.run, first) : zeros.data();
                add_rows<in, Rows>(row, last - first, wide.get() + s * Rows * padded + k, padded, parts.get() + s * part, width);
            }
        join(parts.get(), pieces.count, part, part);
        for (Index r = 0; r < Rows; ++r) out.put(r, first, parts.get() + r * width, last - first);
    }

    template <MmadOrder in, int Rows>
    static void add_rows(const T* const* row, Index count, const float* x, Index x_stride, float* sums, Index width) {
        Index i = 0;
        for (; i + 2 * kLanes <= count; i += 2 * kLanes) {  // two chains side by side
            add_lanes<in, Rows>(row, i, x, x_stride, sums + i, width);
            add_lanes<in, Rows>(row, i + kLanes, x, x_stride, sums + i + kLanes, width);
        }
        for (; i + kLanes <= count; i += kLanes) add_lanes<in, Rows>(row, i, x, x_stride, sums + i, width);
        if (i == count) return;
        T edge[kFractal][kLanes] = {};  // so that nothing beyond a row is read
        const T* from[kFractal];
        for (Index j = 0; j < kFractal; ++j) {
            std::copy_n(row[j] + i, count - i, edge[j]);
            from[j] = edge[j];
        }
        add_lanes<in, Rows>(from, 0, x, x_stride, sums + i, width);
    }

    template <MmadOrder in, int Rows>
    static void add_lanes(const T* const* row, Index at, const float* x, Index x_stride, float* sums, Index width) {
        for (int r = 0; r < Rows; ++r)
            store(sums + r * width, continued<in>(load(sums + r * width), [&](Index i) { return x[r * x_stride + i] * widen8(row[i] + at); }));
    }
#else
    void columns(Index, Index) const {}
#endif
};

}  // namespace megatron_ext
