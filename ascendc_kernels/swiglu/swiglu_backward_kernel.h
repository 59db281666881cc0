// Gradient of SwiGLU, in the order and with the roundings of megatron_ext/reference/activation.py.
#pragma once
#include "swiglu_kernel.h"

namespace megatron_ext {

// dgate = da * up * (sigmoid * (1 + gate * (1 - sigmoid))), dup = da * (gate / (exp(-gate) + 1)), sigmoid = 1 / (exp(-gate) + 1)
template <typename T>
class SwigluBackward {
 public:
    __aicore__ inline void Init(GM_ADDR da, GM_ADDR gate_up, GM_ADDR dgate_up, const SwigluTiling& tiling, AscendC::TPipe* pipe) {
        tiles_.Init(tiling);
        da_.SetGlobalBuffer((__gm__ T*)da, uint64_t(tiling.rows * tiling.width));
        gate_up_.SetGlobalBuffer((__gm__ T*)gate_up, uint64_t((tiling.rows - 1) * tiling.row_stride + 2 * tiling.width));
        dgate_up_.SetGlobalBuffer((__gm__ T*)dgate_up, uint64_t(tiling.rows * 2 * tiling.width));
        elements_ = uint32_t(tiling.tile_rows * tiling.tile_columns);
        pipe->InitBuffer(in_, 2, 3 * elements_ * sizeof(T));
        pipe->InitBuffer(out_, 2, 2 * elements_ * sizeof(T));
        pipe->InitBuffer(work_buffer_, 6 * elements_ * sizeof(float));
        gate_ = work_buffer_.template Get<float>();
        up_ = gate_[elements_];
        upstream_ = gate_[2 * elements_];
        work_ = gate_[3 * elements_];
        sigmoid_ = gate_[4 * elements_];
        silu_ = gate_[5 * elements_];
    }

    __aicore__ inline void Process() {
        for (int64_t index = AscendC::GetBlockIdx(); index < tiles_.Tiles(); index += AscendC::GetBlockNum()) {
            const typename SwigluTiles<T>::Tile tile = tiles_.At(index);
            CopyIn(tile);
            Widen(tile.Count());
            Compute(tile.Count());
            CopyOut(tile);
        }
    }

 private:
    using Tile = typename SwigluTiles<T>::Tile;

    SwigluTiles<T> tiles_;
    uint32_t elements_;
    AscendC::GlobalTensor<T> da_, gate_up_, dgate_up_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;    // [gate | up | da]
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;  // [dgate | dup]
    AscendC::TBuf<AscendC::TPosition::VECCALC> work_buffer_;
    AscendC::LocalTensor<float> gate_, up_, upstream_, work_, sigmoid_, silu_;

    __aicore__ inline void CopyIn(const Tile& tile) {
        const int64_t stride = tiles_.tiling_.row_stride, width = tiles_.tiling_.width;
        const AscendC::GlobalTensor<T> from = gate_up_[uint64_t(tile.row * stride + tile.column)];
        AscendC::LocalTensor<T> in = in_.template AllocTensor<T>();
        tiles_.Load(in, from, stride, tile);
        tiles_.Load(in[elements_], from[uint64_t(width)], stride, tile);
        tiles_.Load(in[2 * elements_], da_[uint64_t(tile.row * width + tile.column)], width, tile);
        in_.EnQue(in);
    }

    __aicore__ inline void Widen(uint32_t count) {
        AscendC::LocalTensor<T> in = in_.template DeQue<T>();
        AscendC::Cast(gate_, in, AscendC::RoundMode::CAST_NONE, count);
        AscendC::Cast(up_, in[elements_], AscendC::RoundMode::CAST_NONE, count);
        AscendC::Cast(upstream_, in[2 * elements_], AscendC::RoundMode::CAST_NONE, count);
        AscendC::PipeBarrier<PIPE_V>();
        in_.FreeTensor(in);
    }

    // up_ becomes da * up, upstream_ becomes dup, work_ becomes dgate.
    __aicore__ inline void Compute(uint32_t elements) {
        const int32_t count = int32_t(elements);
        SwigluDenominator(work_, gate_, elements);
        AscendC::Duplicate(sigmoid_, 1.0f, count);
        AscendC::Div(silu_, gate_, work_, count);
        AscendC::Mul(up_, upstream_, up_, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Div(sigmoid_, sigmoid_, work_, count);
        AscendC::Mul(upstream_, upstream_, silu_, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(work_, sigmoid_, -1.0f, count);  // 1 - s is 1 + -s to the bit
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(work_, work_, 1.0f, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mul(work_, gate_, work_, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(work_, work_, 1.0f, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mul(work_, sigmoid_, work_, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mul(work_, up_, work_, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::LocalTensor<T> out = out_.template AllocTensor<T>();
        AscendC::Cast(out, work_, AscendC::RoundMode::CAST_RINT, elements);
        AscendC::Cast(out[elements_], upstream_, AscendC::RoundMode::CAST_RINT, elements);
        AscendC::PipeBarrier<PIPE_V>();
        out_.EnQue(out);
    }

    __aicore__ inline void CopyOut(const Tile& tile) {
        const int64_t width = tiles_.tiling_.width;
        const AscendC::GlobalTensor<T> to = dgate_up_[uint64_t(tile.row * 2 * width + tile.column)];
        AscendC::LocalTensor<T> out = out_.template DeQue<T>();
        tiles_.Store(to, out, 2 * width, tile);
        tiles_.Store(to[uint64_t(width)], out[elements_], 2 * width, tile);
        out_.FreeTensor(out);
    }
};

}  // namespace megatron_ext
