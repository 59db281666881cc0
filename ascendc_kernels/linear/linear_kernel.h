// A contraction in the segment tree: the cube core computes the root of every piece, the vector cores join them.
//
// A block takes every GetBlockNum()-th tile of the output. Its cube core leaves the pieces of a tile in one of two slots of a workspace and goes
// on with the next tile while the vector cores, each with half of the rows, add the pieces in the balanced tree and round once.
// Legend: m rows, n columns, k contraction, s pieces.
#pragma once
#include "cube_product.h"
#include "linear_tiling.h"
#include "neighbour_tree.h"

namespace megatron_ext {

constexpr uint16_t kFlagFull = 0, kFlagEmpty = 1;  // of a slot of the workspace

// Which tiles a block takes; the same on its three cores.
struct LinearTiles {
    LinearTiling t;
    int64_t m_tiles, block, count;

    __aicore__ inline explicit LinearTiles(const LinearTiling& tiling) : t(tiling) {
        m_tiles = (t.m + t.tile_m - 1) / t.tile_m;
        const int64_t all = m_tiles * ((t.n + t.tile_n - 1) / t.tile_n), blocks = AscendC::GetBlockNum();
        block = AscendC::GetBlockIdx() / AscendC::GetTaskRatio();
        count = block < all ? (all - block + blocks - 1) / blocks : 0;
    }
    // Neighbouring blocks share the columns, so that they read the same part of the weight.
    __aicore__ inline int64_t Tile(int64_t i) const { return block + i * AscendC::GetBlockNum(); }
    __aicore__ inline int64_t FirstRow(int64_t i) const { return Tile(i) % m_tiles * t.tile_m; }
    __aicore__ inline int64_t FirstColumn(int64_t i) const { return Tile(i) / m_tiles * t.tile_n; }
    __aicore__ inline uint32_t Rows(int64_t i) const { return uint32_t(Smaller(t.m - FirstRow(i), t.tile_m)); }
    __aicore__ inline uint32_t Columns(int64_t i) const { return uint32_t(Smaller(t.n - FirstColumn(i), t.tile_n)); }
    // Of piece s of the block's tile i, as rows of Padded(Columns(i)).
    __aicore__ inline uint64_t Workspace(int64_t i, int64_t s) const {
        return uint64_t(((block * 2 + i % 2) * t.pieces + s) * t.tile_m * t.tile_n);
    }
    static __aicore__ inline int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }
};

template <typename T>
class LinearPieces {
 public:
    __aicore__ inline void Init(GM_ADDR a, GM_ADDR b, GM_ADDR workspace, const LinearTiles& tiles, AscendC::TPipe* pipe) {
        const LinearTiling& t = tiles.t;
        a_.data.SetGlobalBuffer((__gm__ T*)a, uint64_t((t.m - 1) * t.a_stride + t.k));
        b_.data.SetGlobalBuffer((__gm__ T*)b, uint64_t(t.b_rows_of_n ? (t.n - 1) * t.b_stride + t.k : (t.k - 1) * t.b_stride + t.n));
        a_.stride = t.a_stride;
        b_.stride = t.b_stride;
        a_.rows_are_k = false;
        b_.rows_are_k = !t.b_rows_of_n;
        workspace_.SetGlobalBuffer((__gm__ float*)workspace);
        product_.Init(uint32_t(t.tile_m), uint32_t(t.tile_n), pipe);
        pipe->InitBuffer(c_, 2, uint32_t(t.tile_m * t.tile_n * sizeof(float)));
    }

    __aicore__ inline void Process(const LinearTiles& tiles) {
        for (int64_t i = 0; i < tiles.count; ++i) {
            if (i >= 2)
                AscendC::CrossCoreWaitFlag(kFlagEmpty);
            for (int64_t s = 0; s < tiles.t.pieces; ++s) {
                Compute(tiles, i, s);
                CopyOut(tiles, i, s);
            }
            AscendC::CrossCoreSetFlag<2, PIPE_FIX>(kFlagFull);
        }
        for (int64_t i = 0; i < tiles.count && i < 2; ++i)
            AscendC::CrossCoreWaitFlag(kFlagEmpty);
    }

 private:
    CubeOperand<T> a_, b_;
    AscendC::GlobalTensor<float> workspace_;
    CubeProduct<T> product_;
    AscendC::TQue<AscendC::TPosition::CO1, 2> c_;

    __aicore__ inline void Compute(const LinearTiles& tiles, int64_t i, int64_t s) {
        const LinearTiling& t = tiles.t;
        AscendC::LocalTensor<float> c = c_.AllocTensor<float>();
        for (int64_t r = 0; r < t.runs; ++r)
            product_.Accumulate(c, a_, b_, tiles.FirstRow(i), tiles.Rows(i), tiles.FirstColumn(i), tiles.Columns(i), s * t.run + r * t.apart, t.run,
                                r == 0);
        c_.EnQue(c);
    }

    __aicore__ inline void CopyOut(const LinearTiles& tiles, int64_t i, int64_t s) {
        const uint32_t rows = tiles.Rows(i), columns = Padded(tiles.Columns(i));
        AscendC::LocalTensor<float> c = c_.DeQue<float>();
        AscendC::Fixpipe<float, float, AscendC::CFG_ROW_MAJOR>(
            workspace_[tiles.Workspace(i, s)], c,
            AscendC::FixpipeParamsV220(uint16_t(columns), uint16_t(rows), uint16_t(Padded(rows)), columns, false));
        c_.FreeTensor(c);
    }
};

template <typename Out>
class LinearTree {
 public:
    __aicore__ inline void Init(GM_ADDR workspace, GM_ADDR out, const LinearTiles& tiles, AscendC::TPipe* pipe) {
        const LinearTiling& t = tiles.t;
        workspace_.SetGlobalBuffer((__gm__ float*)workspace);
        out_.SetGlobalBuffer((__gm__ Out*)out, uint64_t(t.m * t.n));
        together_ = uint32_t(LinearTiles::Smaller(kOutElements, kInElements / t.pieces) / t.tile_n);
        pipe->InitBuffer(in_queue_, 2, uint32_t(t.pieces * together_ * t.tile_n * sizeof(float)));
        pipe->InitBuffer(out_queue_, 2, uint32_t(together_ * t.tile_n * sizeof(Out)));
    }

    __aicore__ inline void Process(const LinearTiles& tiles) {
        for (int64_t i = 0; i < tiles.count; ++i) {
            const uint32_t rows = tiles.Rows(i), half = (rows + 1) / 2;
            const uint32_t first = AscendC::GetSubBlockIdx() == 0 ? 0 : half, last = AscendC::GetSubBlockIdx() == 0 ? half : rows;
            AscendC::CrossCoreWaitFlag(kFlagFull);
            for (uint32_t row = first; row < last; row += together_) {
                const uint32_t count = last - row < together_ ? last - row : together_;
                CopyIn(tiles, i, row, count);
                Compute(tiles, i, count);
                CopyOut(tiles, i, row, count);
            }
            AscendC::CrossCoreSetFlag<2, PIPE_MTE2>(kFlagEmpty);
        }
    }

 private:
    static constexpr int64_t kInElements = 16384;  // fp32 elements of all pieces in UB, twice: 128 of 192 KB
    static constexpr int64_t kOutElements = 4096;

    uint32_t together_;  // rows
    AscendC::GlobalTensor<float> workspace_;
    AscendC::GlobalTensor<Out> out_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_queue_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_queue_;

    __aicore__ inline void CopyIn(const LinearTiles& tiles, int64_t i, uint32_t row, uint32_t count) {
        constexpr uint32_t kInBlock = 32 / sizeof(float);
        const uint32_t columns = Padded(tiles.Columns(i)), size = count * columns, piece = uint32_t(tiles.t.tile_m * tiles.t.tile_n);
        AscendC::LocalTensor<float> tree = in_queue_.AllocTensor<float>();
        AscendC::DataCopy(tree, workspace_[tiles.Workspace(i, 0) + row * columns],
                          AscendC::DataCopyParams(uint16_t(tiles.t.pieces), uint16_t(size / kInBlock), uint16_t((piece - size) / kInBlock), 0));
        in_queue_.EnQue(tree);
    }

    __aicore__ inline void Compute(const LinearTiles& tiles, int64_t i, uint32_t count) {
        const uint32_t size = count * Padded(tiles.Columns(i));
        AscendC::LocalTensor<float> tree = in_queue_.DeQue<float>();
        AscendC::LocalTensor<Out> out = out_queue_.template AllocTensor<Out>();
        AddNeighbours(tree, tiles.t.pieces, size, size);
        RoundTo(out, tree, size);
        out_queue_.EnQue(out);
        in_queue_.FreeTensor(tree);
    }

    __aicore__ inline void CopyOut(const LinearTiles& tiles, int64_t i, uint32_t row, uint32_t count) {
        const uint32_t bytes = tiles.Columns(i) * sizeof(Out), padded = Padded(tiles.Columns(i)) * sizeof(Out);
        AscendC::LocalTensor<Out> out = out_queue_.template DeQue<Out>();
        AscendC::DataCopyPad(out_[uint64_t((tiles.FirstRow(i) + row) * tiles.t.n + tiles.FirstColumn(i))], out,
                             AscendC::DataCopyExtParams(uint16_t(count), bytes, (padded - bytes) / 32, uint32_t(tiles.t.n * sizeof(Out)) - bytes, 0));
        out_queue_.FreeTensor(out);
    }
};

}  // namespace megatron_ext
