// A contraction in the segment tree on a CPU, with the bits of reference/sums.py: contract_segments. For linear layers, for
// the rows of an expert, and for their input gradients.
//
// Rows are cut into blocks, columns into panels of sixteen, and threads own columns or rows: a result is one chain of additions through its
// pieces and one tree, wherever the cuts are.
#pragma once
#include "direct_rows.h"
#include "few_rows.h"
#include "panels.h"
#include "parallel.h"

namespace megatron_ext {

constexpr Index kBlockRows = 48;           // rows that share a panel while it is in the nearest cache
constexpr Index kGroup = 4;                // panels of one piece that are in the second cache together: 64 columns, whole cache lines
constexpr Index kPackedBytes = 2 << 20;    // panels of all pieces that are kept for the next block of rows

// What reading a weight once for so many rows costs, in multiply-adds with an element: packing a panel costs about as much as four rows.
inline double work_of_rows(Index rows) { return double(rows + 4); }

template <typename T>
class Contraction {
 public:
    // a: [m][k], rows a_stride apart.
    Contraction(MmadOrder order, const T* a, Index a_stride, const Matrix<T>& b, Index m, const Pieces& pieces, const Output<T>& out)
        : order_(order), a_(a), a_stride_(a_stride), b_(b), m_(m), n_(out.columns), pieces_(pieces), out_(out), padded_(round_up(pieces.length(), kFractal)) {}

    void run(const Threads& threads) const {
        const Index panels = (n_ + kPanel - 1) / kPanel;
        const double work = work_of_rows(m_) * n_ * pieces_.length() * pieces_.count;
        if (panels >= threads.count || is_few_rows())
            parallel_ranges(panels, threads, work, [this](Index first, Index last) { columns(first, last); });
        else
            parallel_ranges(m_, threads, work, [this, panels](Index first, Index last) { range(0, panels, first, last); });
    }

    // All rows of panels [first, last).
    void columns(Index first, Index last) const {
        const Index begin = first * kPanel, end = std::min(last * kPanel, n_);
        if (DirectRows<T>::takes(order_, m_, n_, b_, pieces_) && DirectRows<T>{a_, a_stride_, b_, m_, n_, pieces_, out_}.columns(begin, end)) return;
        if (is_few_rows()) return FewRows<T>{order_, a_, a_stride_, b_, m_, n_, pieces_, out_}.columns(begin, end);
        range(first, last, 0, m_);
    }

 private:
    MmadOrder order_;
    const T* a_;
    Index a_stride_;
    Matrix<T> b_;
    Index m_, n_;
    Pieces pieces_;
    Output<T> out_;
    Index padded_;  // length of a piece in whole groups; what lies beyond the piece is zero

    // What a thread works with. Panels: [group][piece][panel of the group][k][16].
    struct Scratch {
        std::unique_ptr<float[]> a, panels, parts;
        std::vector<Magnitudes> b_seen;
        Magnitudes a_seen;
    };

    bool is_few_rows() const { return FewRows<T>::takes(m_, n_, b_, pieces_); }
    Index group_size() const { return kGroup * padded_ * kPanel; }

    void range(Index first_panel, Index last_panel, Index first_row, Index last_row) const {
        const bool kept = last_row - first_row > kBlockRows;  // fewer rows use a panel once
        const Index fitting = kPackedBytes / (pieces_.count * group_size() * Index(sizeof(float)));
        const Index together = kept ? std::max<Index>(1, fitting) * kGroup : round_up(last_panel - first_panel, kGroup);
        Scratch scratch;
        scratch.a = room(pieces_.count * kBlockRows * padded_);
        scratch.panels = room((kept ? together / kGroup * pieces_.count : 1) * group_size());
        scratch.parts = room(pieces_.count * kGroup * kBlockRows * kPanel);
        for (Index p = first_panel; p < last_panel; p += together)
            panels(p, std::min(together, last_panel - p), first_row, last_row, kept, scratch);
    }

    void panels(Index first_panel, Index count, Index first_row, Index last_row, bool kept, Scratch& scratch) const {
        const Index groups = (count + kGroup - 1) / kGroup, pieces = pieces_.count;
        const auto in_group = [&](Index g) { return std::min(kGroup, count - g * kGroup); };
        scratch.b_seen.assign(kept ? groups * pieces : 1, Magnitudes());
        for (Index i = 0; kept && i < groups * pieces; ++i)
            pack(i % pieces, first_panel + i / pieces * kGroup, in_group(i / pieces), scratch.panels.get() + i * group_size(), scratch.b_seen[i]);
        for (Index m0 = first_row; m0 < last_row; m0 += kBlockRows) {
            const Index rows = std::min(kBlockRows, last_row - m0);
            widen_rows(m0, rows, scratch);
            for (Index g = 0; g < groups; ++g) {
                for (Index s = 0; s < pieces; ++s) {
                    const Index at = kept ? g * pieces + s : 0;
                    float* packed = scratch.panels.get() + at * group_size();
                    if (!kept) pack(s, first_panel + g * kGroup, in_group(g), packed, scratch.b_seen[0] = Magnitudes());
                    multiply(s, rows, in_group(g), packed, products_are_exact<T>(scratch.a_seen, scratch.b_seen[at]), scratch);
                }
                finish(m0, rows, (first_panel + g * kGroup) * kPanel, in_group(g), scratch.parts.get());
            }
        }
    }

    // Panels [p, p + count) of piece s.
    void pack(Index s, Index p, Index count, float* packed, Magnitudes& seen) const {
        const Index step = b_.n_stride == 1 ? kFractal : pieces_.run;  // along k: rows of b that are read side by side, or a whole run
        for (Index r = 0; r < pieces_.runs; ++r)
            for (Index k = 0; k < pieces_.run; k += step)
                for (Index g = 0; g < count; ++g) {
                    const Index n0 = (p + g) * kPanel;
                    pack_panel(b_, pieces_.first(s, r) + k, std::min(step, pieces_.run - k), n0, std::min(kPanel, n_ - n0),
                               packed + (g * padded_ + r * pieces_.run + k) * kPanel, seen);
                }
        const Index length = pieces_.length();
        for (Index g = 0; g < count; ++g) std::fill(packed + (g * padded_ + length) * kPanel, packed + (g + 1) * padded_ * kPanel, 0.0f);
    }

    // [piece][row][k], so that the rows of a tile do not share cache sets.
    void widen_rows(Index m0, Index rows, Scratch& scratch) const {
        scratch.a_seen = Magnitudes();
        for (Index i = 0; i < rows; ++i)
            for (Index s = 0; s < pieces_.count; ++s) {
                float* to = scratch.a.get() + (s * kBlockRows + i) * padded_;
                for (Index r = 0; r < pieces_.runs; ++r) {
                    const T* from = a_ + (m0 + i) * a_stride_ + pieces_.first(s, r);
                    widen(from, pieces_.run, to + r * pieces_.run);
                    scratch.a_seen.add(from, pieces_.run);
                }
                std::fill(to + pieces_.length(), to + padded_, 0.0f);
            }
    }

    // parts[piece][panel of the group][row][16]
    void multiply(Index s, Index rows, Index count, const float* packed, bool exact, const Scratch& scratch) const {
        for (Index g = 0; g < count; ++g) {
            float* part = scratch.parts.get() + (s * kGroup + g) * kBlockRows * kPanel;
            std::fill(part, part + rows * kPanel, 0.0f);
            tiles(order_, exact, scratch.a.get() + s * kBlockRows * padded_, padded_, rows, packed + g * padded_ * kPanel, padded_, part, kPanel);
        }
    }

    void finish(Index m0, Index rows, Index n0, Index count, float* parts) const {
        join(parts, pieces_.count, kGroup * kBlockRows * kPanel, ((count - 1) * kBlockRows + rows) * kPanel);
        for (Index i = 0; i < rows; ++i)
            for (Index g = 0; g < count; ++g)
                out_.put(m0 + i, n0 + g * kPanel, parts + (g * kBlockRows + i) * kPanel, std::min(kPanel, n_ - n0 - g * kPanel));
    }
};

}  // namespace megatron_ext
