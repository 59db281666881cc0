// SwiGLU in the order and with the roundings of megatron_ext/reference/activation.py. Legend: I width of the result, S columns of a tile
// in UB (rounded up to a DataBlock).
#pragma once
#include "kernel_operator.h"
#include "swiglu_tiling.h"

namespace megatron_ext {

// Tiles of rows x columns, and how they travel.
template <typename T>
class SwigluTiles {
 public:
    struct Tile {
        int64_t row, column;
        uint32_t rows, columns, stride;  // stride: S
        __aicore__ inline uint32_t Count() const { return rows * stride; }
    };

    __aicore__ inline void Init(const SwigluTiling& tiling) { tiling_ = tiling; }

    __aicore__ inline int64_t Tiles() const { return (tiling_.rows + tiling_.tile_rows - 1) / tiling_.tile_rows * ColumnTiles(); }

    __aicore__ inline Tile At(int64_t index) const {
        Tile tile;
        tile.row = index / ColumnTiles() * tiling_.tile_rows;
        tile.column = index % ColumnTiles() * tiling_.tile_columns;
        tile.rows = uint32_t(Smaller(tiling_.rows - tile.row, tiling_.tile_rows));
        tile.columns = uint32_t(Smaller(tiling_.width - tile.column, tiling_.tile_columns));
        tile.stride = (tile.columns + kBlock - 1) / kBlock * kBlock;
        return tile;
    }

    // from: where the tile starts.
    __aicore__ inline void Load(const AscendC::LocalTensor<T>& to, const AscendC::GlobalTensor<T>& from, int64_t row_stride,
                                const Tile& tile) const {
        const AscendC::DataCopyExtParams copy(uint16_t(tile.rows), tile.columns * sizeof(T), uint32_t((row_stride - tile.columns) * sizeof(T)), 0, 0);
        AscendC::DataCopyPad(to, from, copy, AscendC::DataCopyPadExtParams<T>());
    }
    __aicore__ inline void Store(const AscendC::GlobalTensor<T>& to, const AscendC::LocalTensor<T>& from, int64_t row_stride,
                                 const Tile& tile) const {
        const AscendC::DataCopyExtParams copy(uint16_t(tile.rows), tile.columns * sizeof(T), 0, uint32_t((row_stride - tile.columns) * sizeof(T)), 0);
        AscendC::DataCopyPad(to, from, copy);
    }

    SwigluTiling tiling_;

 private:
    static constexpr uint32_t kBlock = 32 / sizeof(T);

    __aicore__ inline int64_t ColumnTiles() const { return (tiling_.width + tiling_.tile_columns - 1) / tiling_.tile_columns; }
    static __aicore__ inline int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }
};

// to = exp(-gate) + 1
__aicore__ inline void SwigluDenominator(const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<float>& gate, uint32_t count) {
    AscendC::Muls(to, gate, -1.0f, int32_t(count));
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Exp(to, to, int32_t(count));
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Adds(to, to, 1.0f, int32_t(count));
    AscendC::PipeBarrier<PIPE_V>();
}

// a = round(gate / (exp(-gate) + 1) * up)
template <typename T>
class Swiglu {
 public:
    __aicore__ inline void Init(GM_ADDR gate_up, GM_ADDR a, const SwigluTiling& tiling, AscendC::TPipe* pipe) {
        tiles_.Init(tiling);
        gate_up_.SetGlobalBuffer((__gm__ T*)gate_up, uint64_t((tiling.rows - 1) * tiling.row_stride + 2 * tiling.width));
        a_.SetGlobalBuffer((__gm__ T*)a, uint64_t(tiling.rows * tiling.width));
        elements_ = uint32_t(tiling.tile_rows * tiling.tile_columns);
        pipe->InitBuffer(in_, 2, 2 * elements_ * sizeof(T));
        pipe->InitBuffer(out_, 2, elements_ * sizeof(T));
        pipe->InitBuffer(work_buffer_, 3 * elements_ * sizeof(float));
        gate_ = work_buffer_.template Get<float>();
        up_ = gate_[elements_];
        denominator_ = gate_[2 * elements_];
    }

    __aicore__ inline void Process() {
        for (int64_t index = AscendC::GetBlockIdx(); index < tiles_.Tiles(); index += AscendC::GetBlockNum()) {
            const typename SwigluTiles<T>::Tile tile = tiles_.At(index);
            CopyIn(tile);
            Compute(tile.Count());
            CopyOut(tile);
        }
    }

 private:
    using Tile = typename SwigluTiles<T>::Tile;

    SwigluTiles<T> tiles_;
    uint32_t elements_;
    AscendC::GlobalTensor<T> gate_up_, a_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;  // [gate | up]
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> work_buffer_;
    AscendC::LocalTensor<float> gate_, up_, denominator_;

    __aicore__ inline void CopyIn(const Tile& tile) {
        const int64_t stride = tiles_.tiling_.row_stride;
        const AscendC::GlobalTensor<T> from = gate_up_[uint64_t(tile.row * stride + tile.column)];
        AscendC::LocalTensor<T> in = in_.template AllocTensor<T>();
        tiles_.Load(in, from, stride, tile);
        tiles_.Load(in[elements_], from[uint64_t(tiles_.tiling_.width)], stride, tile);
        in_.EnQue(in);
    }

    __aicore__ inline void Compute(uint32_t count) {
        AscendC::LocalTensor<T> in = in_.template DeQue<T>();
        AscendC::Cast(gate_, in, AscendC::RoundMode::CAST_NONE, count);
        AscendC::Cast(up_, in[elements_], AscendC::RoundMode::CAST_NONE, count);
        AscendC::PipeBarrier<PIPE_V>();
        in_.FreeTensor(in);
        SwigluDenominator(denominator_, gate_, count);
        AscendC::Div(gate_, gate_, denominator_, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mul(gate_, gate_, up_, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::LocalTensor<T> a = out_.template AllocTensor<T>();
        AscendC::Cast(a, gate_, AscendC::RoundMode::CAST_RINT, count);
        AscendC::PipeBarrier<PIPE_V>();
        out_.EnQue(a);
    }

    __aicore__ inline void CopyOut(const Tile& tile) {
        const int64_t width = tiles_.tiling_.width;
        AscendC::LocalTensor<T> a = out_.template DeQue<T>();
        tiles_.Store(a_[uint64_t(tile.row * width + tile.column)], a, width, tile);
        out_.FreeTensor(a);
    }
};

}  // namespace megatron_ext
