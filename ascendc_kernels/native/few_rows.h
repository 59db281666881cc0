// A contraction in the segment tree for one to four rows, which is bound by reading the weight: values are widened and multiplied where they
// are, without a copy. Needs AVX2; elsewhere `takes` is false. What direct_rows.h takes does not come here.
//
// Products are not fused here: to ask whether they are exact would cost more than it gains.
#pragma once
#include "ahead.h"
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
    static constexpr Index kLineValues = Ahead<T>::kLineValues;

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

    // ---- columns of b are contiguous: lanes are pieces of the same column, and more columns where pieces are few, so that the matrix is read
    // nearly in the order of its memory.

    static constexpr Index kBlock = 64;  // columns that are joined and written together

    template <MmadOrder in, int Rows>
    void transposed(Index first, Index last) const {
        const Index ways = std::min<Index>(kLanes, pieces.count & -pieces.count), columns = kLanes / ways;  // the largest power of two that divides count
        const std::unique_ptr<float[]> x = ways == 1 ? wide_rows(pieces.length()) : x_lanes(ways), parts = room(pieces.count * Rows * kBlock);
        Ahead<T> ahead(b, first, pieces.count * pieces.length(), columns);
        for (Index n0 = first; n0 < last; n0 += kBlock) {
            const Index width = std::min(kBlock, last - n0);
            for (Index i = 0; i < width; i += columns) {
                const Index column = std::min(n0 + i, n - columns);  // the last ones are computed again rather than cut
                for (Index s = 0; s < pieces.count; s += ways) {
                    Lanes sums[Rows] = {};
                    ways == 1 ? chain<in, Rows, true>(s, ways, column, x.get(), ahead, sums) : chain<in, Rows, false>(s, ways, column, x.get(), ahead, sums);
                    for (Index lane = 0; lane < kLanes; ++lane) {
                        const Index at = column - n0 + lane / ways;
                        for (int r = 0; at >= 0 && r < Rows; ++r) parts[((s + lane % ways) * Rows + r) * kBlock + at] = sums[r][lane];
                    }
                }
            }
            join(parts.get(), pieces.count, Rows * kBlock, Rows * kBlock);
            for (int r = 0; r < Rows; ++r) out.put(r, n0, parts.get() + r * kBlock, width);
        }
    }

    // rows of a in fp32, lanes as in `chain`: [group of pieces][row][k][lane]
    std::unique_ptr<float[]> x_lanes(Index ways) const {
        const Index length = pieces.length();
        std::unique_ptr<float[]> lanes = room(pieces.count / ways * m * length * kLanes);
        for (Index s = 0; s < pieces.count; ++s)
            for (Index i = 0; i < m; ++i)
                for (Index k = 0; k < length; ++k) {
                    const float value = to_float(a[i * a_stride + pieces.first(s, k / pieces.run) + k % pieces.run]);
                    float* to = lanes.get() + ((s / ways * m + i) * length + k) * kLanes;
                    for (Index lane = s % ways; lane < kLanes; lane += ways) to[lane] = value;
                }
        return lanes;
    }

    // One chain of additions in every lane and row: lane c * ways + p runs through piece s + p of column + c. Same: x is the same in all lanes.
    template <MmadOrder in, int Rows, bool Same>
    void chain(Index s, Index ways, Index column, const float* x, Ahead<T>& ahead, Lanes* sums) const {
        const Index length = pieces.length(), step = Same ? 1 : kLanes;
        x += s / ways * Rows * length * step;
        for (Index r = 0; r < pieces.runs; ++r, x += pieces.run * step) {
            const T* from[kLanes];
            for (Index lane = 0; lane < kLanes; ++lane) from[lane] = b.at(pieces.first(s + lane % ways, r), column + lane / ways);
            for (Index k = 0; k < pieces.run; k += kFractal) {
                ahead.lines(kLanes * kFractal / kLineValues);
                add_fractal<in, Rows, Same>([&](Index lane) { return from[lane] + k; }, x + k * step, length * step, sums);
            }
        }
    }

    // sums[row] continues through sixteen values of k, which begin at from(lane) in each lane.
    template <MmadOrder in, int Rows, bool Same, typename From>
    static void add_fractal(From from, const float* x, Index x_stride, Lanes* sums) {
        const Fractal<T> weight(from);
        for (int r = 0; r < Rows; ++r, x += x_stride)
            sums[r] = continued<in>(sums[r], [&](Index i) { return Same ? x[i] * weight[i] : load(x + i * kLanes) * weight[i]; });
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
