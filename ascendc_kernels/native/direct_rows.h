// A contraction in the segment tree for so few rows that they would not pay for a packed panel: a fractal of the weight becomes columns in registers and
// is multiplied by all rows there. Sequential order only. Needs AVX2 and FMA; elsewhere `takes` is false.
//
// Whether products are exact is known when the weight has been read, so sums are fused meanwhile, and thrown away in the rare case.
#pragma once
#include "ahead.h"
#include "tiles.h"
#include "widen.h"

namespace megatron_ext {

constexpr Index kFewestDirect = 2, kMostDirect = 32;  // rows
constexpr Index kDirectTile = 8;                       // rows whose sums stay in registers

template <typename T>
struct DirectRows {
    const T* a;
    Index a_stride;
    Matrix<T> b;
    Index m, n;
    Pieces pieces;
    Output<T> out;

    static bool takes(MmadOrder order, Index m, Index n, const Matrix<T>& b, const Pieces& pieces) {
#if defined(__AVX2__) && defined(__FMA__)
        return order == kSequential && m >= kFewestDirect && m <= kMostDirect && n >= kLanes && b.n_stride != 1 && pieces.run % kFractal == 0;
#else
        return (void)order, (void)m, (void)n, (void)b, (void)pieces, false;
#endif
    }

#if defined(__AVX2__) && defined(__FMA__)
    // Results [first, last) of every row; false, with some of them not written, if products are not exact.
    bool columns(Index first, Index last) const {
        const Index tiles = (m + kDirectTile - 1) / kDirectTile, part = m * kBlock, length = pieces.count * pieces.length();
        Magnitudes a_seen;
        const std::unique_ptr<float[]> x = fractals_of_rows(tiles, a_seen), parts_room = room(kLanes + pieces.count * part);
        float* const parts = parts_room.get() + kLanes;  // the last columns may begin before the first of a block
        Ahead<T> ahead(b, first, length, kLanes);
        for (Index n0 = first; n0 < last; n0 += kBlock) {
            const Index width = std::min(kBlock, last - n0);
            for (Index i = 0; i < width; i += kLanes) {
                const Index column = std::min(n0 + i, n - kLanes);  // the last ones are computed again rather than cut
                Magnitudes b_seen;
                for (Index t = 0; t < tiles; ++t) {
                    const Index row = m * t / tiles;
                    tile(m * (t + 1) / tiles - row, x.get() + row * length, column, t ? nullptr : &ahead, b_seen, parts + row * kBlock + column - n0);
                }
                if (!products_are_exact<T>(a_seen, b_seen)) return false;
            }
            join(parts, pieces.count, part, part);
            for (Index r = 0; r < m; ++r) out.put(r, n0, parts + r * kBlock, width);
        }
        return true;
    }

 private:
    static constexpr Index kBlock = 64;  // columns that are joined and written together

    // a in fp32 as it is used: [tile][fractal][row of the tile][16]
    std::unique_ptr<float[]> fractals_of_rows(Index tiles, Magnitudes& seen) const {
        const Index length = pieces.count * pieces.length();
        std::unique_ptr<float[]> x = room(m * length);
        float* to = x.get();
        for (Index t = 0; t < tiles; ++t)
            for (Index s = 0; s < pieces.count; ++s)
                for (Index r = 0; r < pieces.runs; ++r)
                    for (Index k = 0; k < pieces.run; k += kFractal)
                        for (Index i = m * t / tiles; i < m * (t + 1) / tiles; ++i, to += kFractal) {
                            const T* from = a + i * a_stride + pieces.first(s, r) + k;
                            widen<kFractal>(from, to);
                            seen.add_panel_row(from);
                        }
        return x;
    }

    // Rows are cut evenly, so that no tile has a single one.
    void tile(Index rows, const float* x, Index column, Ahead<T>* ahead, Magnitudes& seen, float* parts) const {
        switch (rows) {
            case 2: return tile_of<2>(x, column, ahead, seen, parts);
            case 3: return tile_of<3>(x, column, ahead, seen, parts);
            case 4: return tile_of<4>(x, column, ahead, seen, parts);
            case 5: return tile_of<5>(x, column, ahead, seen, parts);
            case 6: return tile_of<6>(x, column, ahead, seen, parts);
            case 7: return tile_of<7>(x, column, ahead, seen, parts);
            default: return tile_of<8>(x, column, ahead, seen, parts);
        }
    }

    // parts[piece][row][64]: eight columns of it
    template <int Rows>
    void tile_of(const float* x, Index column, Ahead<T>* ahead, Magnitudes& seen, float* parts) const {
        for (Index s = 0; s < pieces.count; ++s, parts += m * kBlock) {
            Lanes sums[Rows] = {};
            for (Index r = 0; r < pieces.runs; ++r) {
                const T* from[kLanes];
                for (Index lane = 0; lane < kLanes; ++lane) from[lane] = b.at(pieces.first(s, r), column + lane);
                for (Index k = 0; k < pieces.run; k += kFractal, x += Rows * kFractal) {
                    if (ahead) ahead->lines(kLanes * kFractal / Ahead<T>::kLineValues);
                    add_fractal<Rows>([&](Index lane) { return from[lane] + k; }, x, seen, sums);
                }
            }
            for (int r = 0; r < Rows; ++r) store(parts + r * kBlock, sums[r]);
        }
    }

    template <int Rows, typename From>
    static void add_fractal(From from, const float* x, Magnitudes& seen, Lanes* sums) {
        for (Index lane = 0; lane < kLanes; ++lane) seen.add_panel_row(from(lane));
        const Fractal<T> weight(from);
#pragma GCC unroll 16
        for (Index i = 0; i < kFractal; ++i) {
            const Lanes w = weight[i];
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) sums[r] = Lanes(_mm256_fmadd_ps(_mm256_broadcast_ss(x + r * kFractal + i), __m256(w), __m256(sums[r])));
        }
    }
#else
    bool columns(Index, Index) const { return false; }
#endif
};

}  // namespace megatron_ext
