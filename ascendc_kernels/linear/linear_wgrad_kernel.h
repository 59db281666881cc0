// Weight gradient: grad[n][k] += dy^T x, row after row, with the running fp32 accumulator in L0C.
//
// L0C of this architecture can only be written by Mmad, so the accumulator comes in through one. The vector cores cut every fp32 value g into runs of
// its bits, each of which fits into the eight bits of a bfloat16:
//     g = p0 + p1 + p2 + 2^-100 (p3 + p4)
// p0 is g truncated, p1 what is left truncated, p2 what is left then; bits below 2^-133, where bfloat16 ends, are left to p3 and p4, scaled up. The cube
// core multiplies these pieces with 1 and 2^-100 on the diagonal of a fractal. All pieces have the sign of g and no two share a bit, so every sum of
// some of them is g with other bits cleared: an fp32 value, whatever the order of the additions. Hence C holds g bit for bit. Limits: -0 comes in as +0
// (+0 + -0), after which no sum is -0; an infinity or a NaN spreads to its sixteen neighbours in a row, as it is multiplied with zeros there.
//
// Legend: n rows of the gradient, k its columns, i tile of a block.
#pragma once
#include "cube_product.h"
#include "linear_tiling.h"
#include "neighbour_tree.h"

namespace megatron_ext {

constexpr uint16_t kFlagPieces = 0, kFlagSum = 1;
constexpr uint32_t kPieces = 5, kWholePieces = 3;  // the others are scaled
constexpr float kPieceScale = 0x1p100f;

// A tile of a gradient, which continues through the rows of `sequences` sequences from boundary `first` on; grad: which of the gradients, where there
// are several.
struct LinearWgradTile {
    int64_t row, column;
    uint32_t rows, columns;
    int64_t first, sequences, grad;
};

// Which tiles a block takes, and its workspace; the same on its three cores.
struct LinearWgradBlock {
    LinearWgradTiling t;
    int64_t block, tiles_of_grad, count = 0;

    __aicore__ inline explicit LinearWgradBlock(const LinearWgradTiling& tiling)
        : t(tiling), block(AscendC::GetBlockIdx() / AscendC::GetTaskRatio()), tiles_of_grad(Cuts(tiling.n, tiling.tile_n) * Cuts(tiling.k, tiling.tile_k)) {}
    // Takes every GetBlockNum()-th tile of `all`.
    __aicore__ inline void Share(int64_t all) { count = block < all ? (all - block + AscendC::GetBlockNum() - 1) / AscendC::GetBlockNum() : 0; }
    __aicore__ inline int64_t Taken(int64_t i) const { return block + i * AscendC::GetBlockNum(); }
    __aicore__ inline LinearWgradTile Cut(int64_t tile, int64_t first, int64_t sequences, int64_t grad) const {
        const int64_t n_tiles = Cuts(t.n, t.tile_n), row = tile % n_tiles * t.tile_n, column = tile / n_tiles * t.tile_k;
        return {row, column, uint32_t(t.n - row < t.tile_n ? t.n - row : t.tile_n), uint32_t(t.k - column < t.tile_k ? t.k - column : t.tile_k),
                first, sequences, grad};
    }
    __aicore__ inline uint32_t Size() const { return uint32_t(t.tile_n * t.tile_k); }
    // Elements; slots by the parity of i. Padded rows.
    __aicore__ inline uint64_t Pieces(int64_t i) const { return uint64_t(block * 2 + i % 2) * kPieces * Size(); }
    __aicore__ inline uint64_t Sum(int64_t i) const { return uint64_t(block * 2 + i % 2) * Size(); }
    __aicore__ inline uint64_t Diagonals() const { return uint64_t(block) * 2 * kFractalSize; }
    static __aicore__ inline int64_t Cuts(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }
};

// One gradient.
struct LinearWgradTiles : LinearWgradBlock {
    __aicore__ inline explicit LinearWgradTiles(const LinearWgradTiling& tiling) : LinearWgradBlock(tiling) { Share(tiles_of_grad); }
    __aicore__ inline LinearWgradTile At(int64_t i) const { return Cut(Taken(i), 0, t.sequences, 0); }
};

// In this order, each with room for all blocks.
struct LinearWgradWorkspace {
    AscendC::GlobalTensor<float> sum;
    AscendC::GlobalTensor<bfloat16_t> pieces, diagonals;

    __aicore__ inline void Init(GM_ADDR workspace, const LinearWgradBlock& tiles) {
        const uint64_t slots = uint64_t(AscendC::GetBlockNum()) * 2 * tiles.Size();
        sum.SetGlobalBuffer((__gm__ float*)workspace, slots);
        pieces.SetGlobalBuffer((__gm__ bfloat16_t*)(workspace + slots * sizeof(float)), slots * kPieces);
        diagonals.SetGlobalBuffer((__gm__ bfloat16_t*)(workspace + slots * (sizeof(float) + kPieces * sizeof(bfloat16_t))),
                                  uint64_t(AscendC::GetBlockNum()) * 2 * kFractalSize);
    }
};

// The cube core's part.
template <typename T>
class LinearWgradSum {
 public:
    __aicore__ inline void Init(GM_ADDR dy, GM_ADDR x, GM_ADDR boundaries, const LinearWgradWorkspace& workspace, const LinearWgradBlock& tiles,
                                AscendC::TPipe* pipe) {
        workspace_ = workspace;
        boundaries_.SetGlobalBuffer((__gm__ int64_t*)boundaries, uint64_t(tiles.t.sequences + 1));
        Bind(dy_, dy, tiles.t.dy_stride);
        Bind(x_, x, tiles.t.x_stride);
        product_.Init(uint32_t(tiles.t.tile_n), uint32_t(tiles.t.tile_k), pipe);
        pipe->InitBuffer(pieces_, 1, (kPieces * tiles.Size() + 2 * kFractalSize) * sizeof(bfloat16_t));
        pipe->InitBuffer(c_, 2, tiles.Size() * sizeof(float));
    }

    template <typename Tiles>
    __aicore__ inline void Process(Tiles& tiles) {
        for (int64_t i = 0; i < tiles.count; ++i) {
            const LinearWgradTile tile = tiles.At(i);
            AscendC::LocalTensor<float> c = c_.AllocTensor<float>();
            AscendC::CrossCoreWaitFlag(kFlagPieces);
            CopyIn(tiles, tile, i);
            Start(c, InFractals(tile.rows), InFractals(tile.columns), tiles.Size());
            for (int64_t q = tile.first; q < tile.first + tile.sequences; ++q) {
                const int64_t first = boundaries_.GetValue(uint64_t(q));
                product_.Accumulate(c, dy_, x_, tile.row, tile.rows, tile.column, tile.columns, first, boundaries_.GetValue(uint64_t(q + 1)) - first, false);
            }
            c_.EnQue(c);
            CopyOut(tile, tiles.Sum(i));
            AscendC::CrossCoreSetFlag<2, PIPE_FIX>(kFlagSum);
        }
    }

 private:
    CubeOperand<T> dy_, x_;
    AscendC::GlobalTensor<int64_t> boundaries_;
    LinearWgradWorkspace workspace_;
    CubeProduct<T> product_;
    AscendC::TQue<AscendC::TPosition::A1, 1> pieces_;  // and both diagonals
    AscendC::TQue<AscendC::TPosition::CO1, 2> c_;

    __aicore__ inline void Bind(CubeOperand<T>& operand, GM_ADDR data, int64_t stride) {
        operand.data.SetGlobalBuffer((__gm__ T*)data);
        operand.stride = stride;
        operand.rows_are_k = true;
    }

    __aicore__ inline void CopyIn(const LinearWgradBlock& tiles, const LinearWgradTile& tile, int64_t i) {
        const uint32_t columns = Padded(tile.columns);
        AscendC::LocalTensor<bfloat16_t> pieces = pieces_.AllocTensor<bfloat16_t>();
        for (uint32_t p = 0; p < kPieces; ++p)
            LoadMatrix(pieces[p * tiles.Size()], workspace_.pieces[tiles.Pieces(i) + p * tiles.Size()], tile.rows, columns, columns, true);
        AscendC::DataCopy(pieces[kPieces * tiles.Size()], workspace_.diagonals[tiles.Diagonals()], 2 * kFractalSize);
        pieces_.EnQue(pieces);
    }

    // C = the pieces of the accumulator times the diagonals, sixteen columns at a time.
    __aicore__ inline void Start(const AscendC::LocalTensor<float>& c, uint32_t n1, uint32_t k1, uint32_t size) {
        AscendC::LocalTensor<bfloat16_t> pieces = pieces_.DeQue<bfloat16_t>();
        AscendC::LocalTensor<bfloat16_t> right = product_.b2_.template AllocTensor<bfloat16_t>();
        const AscendC::LocalTensor<bfloat16_t> diagonals = pieces[kPieces * size];
        AscendC::LoadData(right, diagonals, AscendC::LoadData2DParams(0, kWholePieces, 0, 0, 0, false, 0));
        AscendC::LoadData(right[kWholePieces * kFractalSize], diagonals, AscendC::LoadData2DParams(1, kPieces - kWholePieces, 0, 0, 0, false, 0));
        product_.b2_.EnQue(right);
        right = product_.b2_.template DeQue<bfloat16_t>();
        for (uint32_t j = 0; j < k1; ++j) {
            AscendC::LocalTensor<bfloat16_t> left = product_.a2_.template AllocTensor<bfloat16_t>();
            for (uint32_t p = 0; p < kPieces; ++p)
                AscendC::LoadData(left[p * kFractalSize], pieces[p * size],
                                  AscendC::LoadData2DParams(uint16_t(j * n1), uint8_t(n1), 1, 0, kPieces - 1, false, 0));
            product_.a2_.EnQue(left);
            left = product_.a2_.template DeQue<bfloat16_t>();
            AscendC::Mmad(c[j * n1 * kFractalSize], left, right,
                          AscendC::MmadParams(uint16_t(n1 * kSide), uint16_t(kSide), uint16_t(kPieces * kSide), 0, false, true));
            product_.a2_.FreeTensor(left);
        }
        AscendC::PipeBarrier<PIPE_M>();
        product_.b2_.FreeTensor(right);
        pieces_.FreeTensor(pieces);
    }

    __aicore__ inline void CopyOut(const LinearWgradTile& tile, uint64_t to) {
        const uint32_t columns = Padded(tile.columns);
        AscendC::LocalTensor<float> c = c_.DeQue<float>();
        AscendC::Fixpipe<float, float, AscendC::CFG_ROW_MAJOR>(
            workspace_.sum[to], c, AscendC::FixpipeParamsV220(uint16_t(columns), uint16_t(tile.rows), uint16_t(Padded(tile.rows)), columns, false));
        c_.FreeTensor(c);
    }
};

// One gradient, of that size.
class LinearWgradGradient {
 public:
    __aicore__ inline void Init(GM_ADDR grad, uint64_t size) { grad_.SetGlobalBuffer((__gm__ float*)grad, size); }
    __aicore__ inline AscendC::GlobalTensor<float> operator[](int64_t) const { return grad_; }

 private:
    AscendC::GlobalTensor<float> grad_;
};

// The vector cores' part: they cut the accumulator into pieces, one tile ahead of the cube core, and store its sums. The two flags are enough for both
// slots: pieces of tile i + 2 are written after the sum of tile i was waited for, and announced after it was stored.
// `Gradients` has operator[]: where gradient g lies.
template <typename Gradients>
class LinearWgradAccumulator {
 public:
    __aicore__ inline void Init(const Gradients& grads, const LinearWgradWorkspace& workspace, const LinearWgradBlock& tiles, AscendC::TPipe* pipe) {
        grads_ = grads;
        workspace_ = workspace;
        together_ = uint32_t(kElements / tiles.t.tile_k);
        const uint32_t elements = together_ * uint32_t(tiles.t.tile_k);
        pipe->InitBuffer(in_, 2, elements * sizeof(float));
        pipe->InitBuffer(out_, 2, elements * sizeof(float));
        pipe->InitBuffer(out_pieces_, 2, kPieces * elements * sizeof(bfloat16_t));
        pipe->InitBuffer(piece_buffer_, elements * sizeof(float));
        piece_ = piece_buffer_.Get<float>();
    }

    template <typename Tiles>
    __aicore__ inline void Process(Tiles& tiles) {
        if (tiles.count == 0) return;
        StoreDiagonals(tiles.Diagonals());
        LinearWgradTile tile = tiles.At(0), next = tile;
        Cut(tiles, tile, 0);
        for (int64_t i = 0; i < tiles.count; ++i, tile = next) {
            if (i + 1 < tiles.count) {
                next = tiles.At(i + 1);
                Cut(tiles, next, i + 1);
            }
            AscendC::CrossCoreWaitFlag(kFlagSum);
            ForRows(tile, [&](uint32_t row, uint32_t count) { Store(tiles.t.k, tile, tiles.Sum(i), row, count); });
        }
    }

 private:
    static constexpr uint32_t kElements = 4096;  // of the accumulator in UB

    uint32_t together_;  // rows
    Gradients grads_;
    LinearWgradWorkspace workspace_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_, out_pieces_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> piece_buffer_;
    AscendC::LocalTensor<float> piece_;

    // The first or the second half of a tile's rows, a few at a time.
    template <typename Body>
    __aicore__ inline void ForRows(const LinearWgradTile& tile, Body body) {
        const uint32_t half = (tile.rows + 1) / 2;
        const uint32_t first = AscendC::GetSubBlockIdx() == 0 ? 0 : half, last = AscendC::GetSubBlockIdx() == 0 ? half : tile.rows;
        for (uint32_t row = first; row < last; row += together_) body(row, last - row < together_ ? last - row : together_);
    }

    // Fractals with 1 and with 1 / kPieceScale on the diagonal, by the first vector core.
    __aicore__ inline void StoreDiagonals(uint64_t to) {
        if (AscendC::GetSubBlockIdx() != 0) return;
        AscendC::LocalTensor<bfloat16_t> diagonals = out_pieces_.AllocTensor<bfloat16_t>();
        AscendC::Duplicate(piece_, 0.0f, int32_t(2 * kFractalSize));
        AscendC::SetFlag<AscendC::HardEvent::V_S>(0);
        AscendC::WaitFlag<AscendC::HardEvent::V_S>(0);
        for (uint32_t i = 0; i < kSide; ++i) {
            piece_.SetValue(i * (kSide + 1), 1.0f);
            piece_.SetValue(kFractalSize + i * (kSide + 1), 1.0f / kPieceScale);
        }
        AscendC::SetFlag<AscendC::HardEvent::S_V>(0);
        AscendC::WaitFlag<AscendC::HardEvent::S_V>(0);
        AscendC::Cast(diagonals, piece_, AscendC::RoundMode::CAST_RINT, 2 * kFractalSize);
        out_pieces_.EnQue(diagonals);
        diagonals = out_pieces_.DeQue<bfloat16_t>();
        AscendC::DataCopy(workspace_.diagonals[to], diagonals, 2 * kFractalSize);
        out_pieces_.FreeTensor(diagonals);
    }

    __aicore__ inline void Cut(const LinearWgradBlock& tiles, const LinearWgradTile& tile, int64_t i) {
        ForRows(tile, [&](uint32_t row, uint32_t count) {
            const uint32_t columns = Padded(tile.columns), size = count * columns;
            CopyIn(tiles.t.k, tile, row, count);
            Compute(size);
            CopyOut(tiles.Size(), tiles.Pieces(i) + row * columns, size);
        });
        AscendC::CrossCoreSetFlag<2, PIPE_MTE3>(kFlagPieces);
    }

    // Columns beyond the gradient are zero: they are multiplied with the others' zeros, and 0 x NaN is not 0.
    __aicore__ inline void CopyIn(int64_t k, const LinearWgradTile& tile, uint32_t row, uint32_t count) {
        const uint32_t missing = Padded(tile.columns) - tile.columns, most = 32 / sizeof(float);
        const uint32_t bytes = tile.columns * sizeof(float);
        AscendC::LocalTensor<float> in = in_.AllocTensor<float>();
        AscendC::DataCopyPad(in, grads_[tile.grad][uint64_t((tile.row + row) * k + tile.column)],
                             AscendC::DataCopyExtParams(uint16_t(count), bytes, uint32_t(k * sizeof(float)) - bytes, 0, 0),
                             AscendC::DataCopyPadExtParams<float>(missing > 0, 0, uint8_t(missing < most ? missing : most), 0.0f));
        in_.EnQue(in);
    }

    __aicore__ inline void Compute(uint32_t size) {
        AscendC::LocalTensor<float> rest = in_.DeQue<float>();
        AscendC::LocalTensor<bfloat16_t> pieces = out_pieces_.AllocTensor<bfloat16_t>();
        for (uint32_t p = 0; p < kPieces; ++p) {
            if (p == kWholePieces) {
                AscendC::Muls(rest, rest, kPieceScale, int32_t(size));
                AscendC::PipeBarrier<PIPE_V>();
            }
            AscendC::Cast(pieces[p * size], rest, AscendC::RoundMode::CAST_TRUNC, size);
            AscendC::PipeBarrier<PIPE_V>();
            if (p + 1 == kPieces) break;
            AscendC::Cast(piece_, pieces[p * size], AscendC::RoundMode::CAST_NONE, size);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Sub(rest, rest, piece_, int32_t(size));
            AscendC::PipeBarrier<PIPE_V>();
        }
        out_pieces_.EnQue(pieces);
        in_.FreeTensor(rest);
    }

    // `size` neighbouring elements of every piece; a piece is `piece` elements.
    __aicore__ inline void CopyOut(uint32_t piece, uint64_t to, uint32_t size) {
        constexpr uint32_t kInBlock = 32 / sizeof(bfloat16_t);
        AscendC::LocalTensor<bfloat16_t> pieces = out_pieces_.DeQue<bfloat16_t>();
        AscendC::DataCopy(workspace_.pieces[to], pieces,
                          AscendC::DataCopyParams(uint16_t(kPieces), uint16_t(size / kInBlock), 0, uint16_t((piece - size) / kInBlock)));
        out_pieces_.FreeTensor(pieces);
    }

    __aicore__ inline void Store(int64_t k, const LinearWgradTile& tile, uint64_t from, uint32_t row, uint32_t count) {
        const uint32_t columns = Padded(tile.columns), size = count * columns, bytes = tile.columns * sizeof(float);
        AscendC::LocalTensor<float> sum = in_.AllocTensor<float>();
        AscendC::DataCopy(sum, workspace_.sum[from + row * columns], size);
        in_.EnQue(sum);
        sum = in_.DeQue<float>();
        AscendC::LocalTensor<float> out = out_.AllocTensor<float>();
        RoundTo(out, sum, size);
        out_.EnQue(out);
        in_.FreeTensor(sum);
        out = out_.DeQue<float>();
        AscendC::DataCopyPad(grads_[tile.grad][uint64_t((tile.row + row) * k + tile.column)], out,
                             AscendC::DataCopyExtParams(uint16_t(count), bytes, (columns * sizeof(float) - bytes) / 32,
                                                        uint32_t(k * sizeof(float)) - bytes, 0));
        out_.FreeTensor(out);
    }
};

}  // namespace megatron_ext
