// Sums of rows: blocks of 64, an adjacent-pair tree inside a block, blocks one after another from +0. That is ReduceSum by count on A2/A3.
//
// A row that is longer than a tile continues: its running sum is the only term, besides +0, of a block before the next tile.
#pragma once
#include "elementary_tiling.h"
#include "kernel_operator.h"

namespace megatron_ext {

constexpr uint32_t kRowSumRepeat = MEGATRON_EXT_ROW_SUM_BLOCK;  // fp32 lanes of a repeat, which ReduceSum adds as one tree

class RowSum {
 public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR sums, const RowSumTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        const uint32_t columns = uint32_t(tiling.tile_columns);
        x_.SetGlobalBuffer((__gm__ float*)x, uint64_t(tiling.rows * tiling.width));
        sums_.SetGlobalBuffer((__gm__ float*)sums, uint64_t(tiling.rows));
        pipe->InitBuffer(in_, 2, uint32_t(tiling.tile_rows) * columns * sizeof(float));
        pipe->InitBuffer(out_, 2, uint32_t(kRowSumMaxTileRows * sizeof(float)));
        pipe->InitBuffer(terms_buffer_, (kRowSumRepeat + columns) * sizeof(float));
        pipe->InitBuffer(scratch_buffer_, RoundUp(1 + columns / kRowSumRepeat, 8) * sizeof(float));
        terms_ = terms_buffer_.Get<float>();
        scratch_ = scratch_buffer_.Get<float>();
        AscendC::Duplicate(terms_, 0.0f, int32_t(kRowSumRepeat + columns));  // a masked lane in a sum tree is undocumented: unused ones are +0
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void Process() {
        const int64_t step = tiling_.tile_rows;
        for (int64_t first = AscendC::GetBlockIdx() * step; first < tiling_.rows; first += AscendC::GetBlockNum() * step) {
            const uint32_t rows = uint32_t(Smaller(tiling_.rows - first, step));
            AscendC::LocalTensor<float> sums = out_.AllocTensor<float>();
            for (int64_t column = 0; column < tiling_.width; column += tiling_.tile_columns) {
                const uint32_t columns = uint32_t(Smaller(tiling_.width - column, tiling_.tile_columns));
                CopyIn(first, rows, column, columns);
                Compute(sums, rows, column, columns);
            }
            out_.EnQue(sums);
            CopyOut(first, rows);
        }
    }

 private:
    RowSumTiling tiling_;
    AscendC::GlobalTensor<float> x_, sums_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> terms_buffer_, scratch_buffer_;
    AscendC::LocalTensor<float> terms_;  // [running sum, +0 ... | one row of a tile, +0 up to a whole block]
    AscendC::LocalTensor<float> scratch_;

    static __aicore__ inline uint32_t RoundUp(uint32_t n, uint32_t multiple) { return (n + multiple - 1) / multiple * multiple; }
    static __aicore__ inline int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }

    __aicore__ inline void CopyIn(int64_t first, uint32_t rows, int64_t column, uint32_t columns) {
        const AscendC::DataCopyExtParams copy(uint16_t(rows), uint32_t(columns * sizeof(float)), uint32_t((tiling_.width - columns) * sizeof(float)), 0, 0);
        AscendC::LocalTensor<float> x = in_.AllocTensor<float>();
        AscendC::DataCopyPad(x, x_[uint64_t(first * tiling_.width + column)], copy, AscendC::DataCopyPadExtParams<float>());
        in_.EnQue(x);
    }

    __aicore__ inline void Compute(const AscendC::LocalTensor<float>& sums, uint32_t rows, int64_t column, uint32_t columns) {
        const uint32_t stride = RoundUp(columns, 8), terms = RoundUp(columns, kRowSumRepeat);
        AscendC::LocalTensor<float> x = in_.DeQue<float>();
        if (column > 0) Continue(sums, terms, columns);
        for (uint32_t r = 0; r < rows; ++r) {
            AscendC::Adds(terms_[kRowSumRepeat], x[r * stride], -0.0f, int32_t(columns));  // a copy that keeps the sign of zero
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::ReduceSum<float>(sums[r], terms_, scratch_, int32_t(kRowSumRepeat + terms));
            AscendC::PipeBarrier<PIPE_V>();
        }
        in_.FreeTensor(x);
        if (column > 0) {
            AscendC::Duplicate(terms_, 0.0f, 1);
            AscendC::PipeBarrier<PIPE_V>();
        }
    }

    // The running sum of a long row as the first term; what the tile before left behind the end of this one becomes +0.
    __aicore__ inline void Continue(const AscendC::LocalTensor<float>& sums, uint32_t terms, uint32_t columns) const {
        AscendC::Adds(terms_, sums, -0.0f, 1);
        if (terms > columns) AscendC::Duplicate(terms_[terms], 0.0f, int32_t(kRowSumRepeat));
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void CopyOut(int64_t first, uint32_t rows) {
        AscendC::LocalTensor<float> sums = out_.DeQue<float>();
        AscendC::DataCopyPad(sums_[uint64_t(first)], sums, AscendC::DataCopyExtParams(1, uint32_t(rows * sizeof(float)), 0, 0, 0));
        out_.FreeTensor(sums);
    }
};

}  // namespace megatron_ext
