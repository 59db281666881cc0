// A contraction in the segment tree: the cube core computes the root of every piece, the vector cores join them.
//
// For a linear layer and, with a matrix of each expert, for ../grouped_linear. A block takes every GetBlockNum()-th tile of the output. Its cube core
// leaves the pieces of a tile in one of two slots of a workspace and goes on with the next tile while the vector cores, each with half of the rows, add
// the pieces in the balanced tree and round once.
// Legend: m rows, n columns, k contraction, s pieces.
#pragma once
#include "cube_product.h"
#include "linear_tiling.h"
#include "neighbour_tree.h"

namespace megatron_ext {

constexpr uint16_t kFlagFull = 0, kFlagEmpty = 1;  // of a slot of the workspace

// A tile of the output; b: which of the matrices b it takes, where there are several.
struct LinearTile {
    int64_t row, column;
    uint32_t rows, columns;
    int64_t b;
};

// Which tiles of the output a block takes, and where its pieces go; the same on its three cores.
struct LinearBlock {
    LinearTiling t;
    int64_t block, count = 0;

    __aicore__ inline explicit LinearBlock(const LinearTiling& tiling) : t(tiling), block(AscendC::GetBlockIdx() / AscendC::GetTaskRatio()) {}
    // Takes every GetBlockNum()-th tile of `all`.
    __aicore__ inline void Share(int64_t all) { count = block < all ? (all - block + AscendC::GetBlockNum() - 1) / AscendC::GetBlockNum() : 0; }
    __aicore__ inline int64_t Taken(int64_t i) const { return block + i * AscendC::GetBlockNum(); }
    // Tiles of `rows` rows. Neighbours share their columns, so that neighbouring blocks read the same part of the weight.
    __aicore__ inline int64_t TilesOf(int64_t rows) const { return Cuts(rows, t.tile_m) * Cuts(t.n, t.tile_n); }
    __aicore__ inline LinearTile Cut(int64_t tile, int64_t first, int64_t rows, int64_t b) const {
        const int64_t row = tile % Cuts(rows, t.tile_m) * t.tile_m, column = tile / Cuts(rows, t.tile_m) * t.tile_n;
        return {first + row, column, uint32_t(Smaller(rows - row, t.tile_m)), uint32_t(Smaller(t.n - column, t.tile_n)), b};
    }
    // Of piece s of the block's tile i, as padded rows.
    __aicore__ inline uint64_t Workspace(int64_t i, int64_t s) const { return uint64_t(((block * 2 + i % 2) * t.pieces + s) * t.tile_m * t.tile_n); }
    static __aicore__ inline int64_t Cuts(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }
    static __aicore__ inline int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }
};

// One matrix b.
struct LinearTiles : LinearBlock {
    __aicore__ inline explicit LinearTiles(const LinearTiling& tiling) : LinearBlock(tiling) { Share(TilesOf(t.m)); }
    __aicore__ inline LinearTile At(int64_t i) const { return Cut(Taken(i), 0, t.m, 0); }
    __aicore__ inline int64_t Matrices() const { return 1; }
    __aicore__ inline int64_t MatrixStride() const { return 0; }
};

template <typename T>
class LinearPieces {
 public:
    template <typename Tiles>
    __aicore__ inline void Init(GM_ADDR a, GM_ADDR b, GM_ADDR workspace, const Tiles& tiles, AscendC::TPipe* pipe) {
        const LinearTiling& t = tiles.t;
        const int64_t b_size = t.b_rows_of_n ? (t.n - 1) * t.b_stride + t.k : (t.k - 1) * t.b_stride + t.n;
        a_.data.SetGlobalBuffer((__gm__ T*)a, uint64_t((t.m - 1) * t.a_stride + t.k));
        matrices_.SetGlobalBuffer((__gm__ T*)b, uint64_t((tiles.Matrices() - 1) * tiles.MatrixStride() + b_size));
        a_.stride = t.a_stride;
        b_.stride = t.b_stride;
        a_.rows_are_k = false;
        b_.rows_are_k = !t.b_rows_of_n;
        workspace_.SetGlobalBuffer((__gm__ float*)workspace);
        product_.Init(uint32_t(t.tile_m), uint32_t(t.tile_n), pipe);
        pipe->InitBuffer(c_, 2, uint32_t(t.tile_m * t.tile_n * sizeof(float)));
    }

    template <typename Tiles>
    __aicore__ inline void Process(Tiles& tiles) {
        for (int64_t i = 0; i < tiles.count; ++i) {
            const LinearTile tile = tiles.At(i);
            b_.data = matrices_[uint64_t(tile.b * tiles.MatrixStride())];
            if (i >= 2)
                AscendC::CrossCoreWaitFlag(kFlagEmpty);
            for (int64_t s = 0; s < tiles.t.pieces; ++s) {
                Compute(tiles.t, tile, s);
                CopyOut(tile, tiles.Workspace(i, s));
            }
            AscendC::CrossCoreSetFlag<2, PIPE_FIX>(kFlagFull);
        }
        for (int64_t i = 0; i < tiles.count && i < 2; ++i)
            AscendC::CrossCoreWaitFlag(kFlagEmpty);
    }

 private:
    CubeOperand<T> a_, b_;
    AscendC::GlobalTensor<T> matrices_;
    AscendC::GlobalTensor<float> workspace_;
    CubeProduct<T> product_;
    AscendC::TQue<AscendC::TPosition::CO1, 2> c_;

    __aicore__ inline void Compute(const LinearTiling& t, const LinearTile& tile, int64_t s) {
        AscendC::LocalTensor<float> c = c_.AllocTensor<float>();
        for (int64_t r = 0; r < t.runs; ++r)
            product_.Accumulate(c, a_, b_, tile.row, tile.rows, tile.column, tile.columns, s * t.run + r * t.apart, t.run, r == 0);
        c_.EnQue(c);
    }

    __aicore__ inline void CopyOut(const LinearTile& tile, uint64_t to) {
        const uint32_t columns = Padded(tile.columns);
        AscendC::LocalTensor<float> c = c_.DeQue<float>();
        AscendC::Fixpipe<float, float, AscendC::CFG_ROW_MAJOR>(
            workspace_[to], c, AscendC::FixpipeParamsV220(uint16_t(columns), uint16_t(tile.rows), uint16_t(Padded(tile.rows)), columns, false));
        c_.FreeTensor(c);
    }
};

template <typename Out>
class LinearTree {
 public:
    __aicore__ inline void Init(GM_ADDR workspace, GM_ADDR out, const LinearTiling& t, AscendC::TPipe* pipe) {
        workspace_.SetGlobalBuffer((__gm__ float*)workspace);
        out_.SetGlobalBuffer((__gm__ Out*)out, uint64_t(t.m * t.n));
        together_ = uint32_t(LinearBlock::Smaller(kOutElements, kInElements / t.pieces) / t.tile_n);
        pipe->InitBuffer(in_queue_, 2, uint32_t(t.pieces * together_ * t.tile_n * sizeof(float)));
        pipe->InitBuffer(out_queue_, 2, uint32_t(together_ * t.tile_n * sizeof(Out)));
    }

    template <typename Tiles>
    __aicore__ inline void Process(Tiles& tiles) {
        for (int64_t i = 0; i < tiles.count; ++i) {
            const LinearTile tile = tiles.At(i);
            const uint32_t half = (tile.rows + 1) / 2;
            const uint32_t first = AscendC::GetSubBlockIdx() == 0 ? 0 : half, last = AscendC::GetSubBlockIdx() == 0 ? half : tile.rows;
            AscendC::CrossCoreWaitFlag(kFlagFull);
            for (uint32_t row = first; row < last; row += together_) {
                const uint32_t count = last - row < together_ ? last - row : together_, columns = Padded(tile.columns);
                CopyIn(tiles.t, tiles.Workspace(i, 0) + row * columns, count * columns);
                Compute(tiles.t.pieces, count * columns);
                CopyOut(tiles.t.n, tile, row, count);
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

    // `size` neighbouring elements of every piece.
    __aicore__ inline void CopyIn(const LinearTiling& t, uint64_t from, uint32_t size) {
        constexpr uint32_t kInBlock = 32 / sizeof(float);
        const uint32_t piece = uint32_t(t.tile_m * t.tile_n);
        AscendC::LocalTensor<float> tree = in_queue_.AllocTensor<float>();
        AscendC::DataCopy(tree, workspace_[from],
                          AscendC::DataCopyParams(uint16_t(t.pieces), uint16_t(size / kInBlock), uint16_t((piece - size) / kInBlock), 0));
        in_queue_.EnQue(tree);
    }

    __aicore__ inline void Compute(int64_t pieces, uint32_t size) {
        AscendC::LocalTensor<float> tree = in_queue_.DeQue<float>();
        AscendC::LocalTensor<Out> out = out_queue_.template AllocTensor<Out>();
        AddNeighbours(tree, pieces, size, size);
        RoundTo(out, tree, size);
        out_queue_.EnQue(out);
        in_queue_.FreeTensor(tree);
    }

    __aicore__ inline void CopyOut(int64_t n, const LinearTile& tile, uint32_t row, uint32_t count) {
        const uint32_t bytes = tile.columns * sizeof(Out), padded = Padded(tile.columns) * sizeof(Out);
        AscendC::LocalTensor<Out> out = out_queue_.template DeQue<Out>();
        AscendC::DataCopyPad(out_[uint64_t((tile.row + row) * n + tile.column)], out,
                             AscendC::DataCopyExtParams(uint16_t(count), bytes, (padded - bytes) / 32, uint32_t(n * sizeof(Out)) - bytes, 0));
        out_queue_.FreeTensor(out);
    }
};

}  // namespace megatron_ext
