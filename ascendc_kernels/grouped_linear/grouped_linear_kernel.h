// Which tiles a block takes when rows belong to experts. The arithmetic is that of ../linear/linear_kernel.h: a row's bits depend on the row and on its
// expert's matrix alone.
//
// Row counts stay in global memory: the host need not wait for the router. Legend: E experts, R rows of all of them, i tile of a block.
#pragma once
#include "../linear/linear_kernel.h"
#include "grouped_linear_tiling.h"

namespace megatron_ext {

// The experts one after another, with the rows [first, first + rows) of each.
class ExpertCursor {
 public:
    int64_t expert, first, rows;

    __aicore__ inline void Init(GM_ADDR counts, int64_t experts, int64_t all_rows) {
        experts_ = experts;
        all_rows_ = all_rows;
        counts_.SetGlobalBuffer((__gm__ int64_t*)counts, uint64_t(experts));
        Start();
    }
    __aicore__ inline void Start() { Read(0, 0); }
    __aicore__ inline bool IsAtEnd() const { return expert == experts_; }
    __aicore__ inline void Next() { Read(expert + 1, first + rows); }

 private:
    int64_t experts_, all_rows_;
    AscendC::GlobalTensor<int64_t> counts_;

    // Counts that do not sum to R must not lead out of the operands.
    __aicore__ inline void Read(int64_t at, int64_t from) {
        expert = at;
        first = from;
        rows = 0;
        if (IsAtEnd()) return;
        const int64_t count = counts_.GetValue(uint64_t(at)), left = all_rows_ - from;
        rows = count < 0 ? 0 : count < left ? count : left;
    }
};

// The tiles of the first expert, then those of the second, and so on. At(i) wants ascending i.
class GroupedLinearTiles : public LinearBlock {
 public:
    __aicore__ inline GroupedLinearTiles(GM_ADDR counts, const GroupedLinearTiling& tiling)
        : LinearBlock(tiling.linear), experts_(tiling.experts), b_size_(tiling.b_size) {
        int64_t all = 0;
        for (at_.Init(counts, tiling.experts, tiling.linear.m); !at_.IsAtEnd(); at_.Next()) all += TilesOf(at_.rows);
        at_.Start();
        Share(all);
    }
    __aicore__ inline LinearTile At(int64_t i) {
        for (; Taken(i) >= before_ + TilesOf(at_.rows); at_.Next()) before_ += TilesOf(at_.rows);
        return Cut(Taken(i) - before_, at_.first, at_.rows, at_.expert);
    }
    __aicore__ inline int64_t Matrices() const { return experts_; }
    __aicore__ inline int64_t MatrixStride() const { return b_size_; }

 private:
    int64_t experts_, b_size_, before_ = 0;  // tiles of the experts before
    ExpertCursor at_;
};

}  // namespace megatron_ext
