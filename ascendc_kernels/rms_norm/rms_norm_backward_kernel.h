// Gradients of RMSNorm. dx row by row; the weight gradient by its owner, a tile of columns, which runs through all rows in order: no
// partial sums, so nothing depends on the number of cores.
#pragma once
#include "rms_norm_kernel.h"

namespace megatron_ext {

// dx = (dxhat - xhat * mean(dxhat * xhat)) * rstd with dxhat = dy * w, xhat = x * rstd; also stores rstd for the weight gradient.
template <typename T>
class RmsNormInputGradient {
 public:
    __aicore__ inline void Init(GM_ADDR dy, GM_ADDR x, GM_ADDR weight, GM_ADDR dx, GM_ADDR rstd, const RmsNormTiling& tiling,
                                AscendC::TPipe* pipe) {
        rows_.Init(tiling, pipe);
        weight_.Init(weight, rows_, pipe);
        dy_.SetGlobalBuffer((__gm__ T*)dy, uint64_t(tiling.rows * tiling.hidden));
        x_.SetGlobalBuffer((__gm__ T*)x);
        dx_.SetGlobalBuffer((__gm__ T*)dx, uint64_t(tiling.rows * tiling.hidden));
        rstd_.SetGlobalBuffer((__gm__ float*)rstd, uint64_t(tiling.rows));
        const uint32_t elements = uint32_t(tiling.tile_rows) * rows_.stride_;
        pipe->InitBuffer(in_, 1, 2 * elements * sizeof(T));
        pipe->InitBuffer(out_, 1, elements * sizeof(T));
        pipe->InitBuffer(out_rstd_, 1, kRmsNormMaxTileRows * sizeof(float));
        pipe->InitBuffer(xhat_buffer_, elements * sizeof(float));
        pipe->InitBuffer(dxhat_buffer_, elements * sizeof(float));
        pipe->InitBuffer(mean_buffer_, kRmsNormMaxTileRows * sizeof(float));
        xhat_ = xhat_buffer_.template Get<float>();
        dxhat_ = dxhat_buffer_.template Get<float>();
        mean_ = mean_buffer_.template Get<float>();
        elements_ = elements;
    }

    __aicore__ inline void Process() {
        for (int64_t tile = AscendC::GetBlockIdx(); tile < rows_.Tiles(); tile += AscendC::GetBlockNum()) {
            const int64_t first = rows_.FirstRow(tile);
            const uint32_t rows = rows_.RowsOf(tile);
            CopyIn(first, rows);
            Normalise(first, rows);
            Compute(rows);
            CopyOut(first, rows);
        }
    }

 private:
    RmsNormRows<T> rows_;
    RmsNormWeight<T> weight_;
    uint32_t elements_;
    AscendC::GlobalTensor<T> dy_, x_, dx_;
    AscendC::GlobalTensor<float> rstd_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> in_;  // [x | dy]
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> out_, out_rstd_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> xhat_buffer_, dxhat_buffer_, mean_buffer_;
    AscendC::LocalTensor<float> xhat_, dxhat_, mean_;

    __aicore__ inline void CopyIn(int64_t first, uint32_t rows) {
        AscendC::LocalTensor<T> in = in_.template AllocTensor<T>();
        rows_.Load(in, x_[rows_.Source(first)], rows_.tiling_.inner_stride, rows);
        rows_.Load(in[elements_], dy_[uint64_t(first) * rows_.h_], rows_.h_, rows);
        in_.EnQue(in);
    }

    // xhat, dxhat, and rstd to global memory
    __aicore__ inline void Normalise(int64_t first, uint32_t rows) {
        const uint32_t count = rows * rows_.stride_;
        AscendC::LocalTensor<T> in = in_.template DeQue<T>();
        AscendC::Cast(xhat_, in, AscendC::RoundMode::CAST_NONE, count);
        AscendC::Cast(dxhat_, in[elements_], AscendC::RoundMode::CAST_NONE, count);
        AscendC::PipeBarrier<PIPE_V>();
        in_.FreeTensor(in);
        rows_.InverseRms(xhat_, rows);
        AscendC::LocalTensor<float> rstd = out_rstd_.template AllocTensor<float>();
        AscendC::Muls(rstd, rows_.rstd_, 1.0f, int32_t(rows));
        out_rstd_.EnQue(rstd);
        rstd = out_rstd_.template DeQue<float>();
        AscendC::DataCopyPad(rstd_[uint64_t(first)], rstd, AscendC::DataCopyExtParams(1, uint32_t(rows * sizeof(float)), 0, 0, 0));
        out_rstd_.FreeTensor(rstd);
        rows_.ScaleRows(xhat_, rows_.rstd_, rows);
        rows_.MultiplyRows(dxhat_, weight_.wide_, rows);
    }

    __aicore__ inline void Compute(uint32_t rows) {
        const uint32_t count = rows * rows_.stride_;
        rows_.SumOfProducts(mean_, dxhat_, xhat_, rows);
        AscendC::Div(mean_, mean_, rows_.width_, int32_t(rows));
        rows_.VectorToScalar();
        rows_.ScaleRows(xhat_, mean_, rows);
        AscendC::Sub(dxhat_, dxhat_, xhat_, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        rows_.ScaleRows(dxhat_, rows_.rstd_, rows);
        AscendC::LocalTensor<T> dx = out_.template AllocTensor<T>();
        AscendC::Cast(dx, dxhat_, AscendC::RoundMode::CAST_RINT, count);
        AscendC::PipeBarrier<PIPE_V>();
        out_.EnQue(dx);
    }

    __aicore__ inline void CopyOut(int64_t first, uint32_t rows) {
        AscendC::LocalTensor<T> dx = out_.template DeQue<T>();
        rows_.Store(dx_[uint64_t(first) * rows_.h_], dx, rows);
        out_.FreeTensor(dx);
    }
};

// dw[h] continues through the rows: dw += dy * round(x * rstd).
template <typename T>
class RmsNormWeightGradient {
 public:
    __aicore__ inline void Init(GM_ADDR dy, GM_ADDR x, GM_ADDR rstd, GM_ADDR dw, const RmsNormTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        dy_.SetGlobalBuffer((__gm__ T*)dy, uint64_t(tiling.rows * tiling.hidden));
        x_.SetGlobalBuffer((__gm__ T*)x);
        rstd_.SetGlobalBuffer((__gm__ float*)rstd, uint64_t(tiling.rows));
        dw_.SetGlobalBuffer((__gm__ float*)dw, uint64_t(tiling.hidden));
        const uint32_t columns = uint32_t(tiling.tile_columns);
        pipe->InitBuffer(in_, 2, 2 * columns * sizeof(T));
        pipe->InitBuffer(in_rstd_, 1, kRstdTogether * sizeof(float));
        pipe->InitBuffer(in_sum_, 1, columns * sizeof(float));
        pipe->InitBuffer(out_sum_, 1, columns * sizeof(float));
        pipe->InitBuffer(x_buffer_, columns * sizeof(float));
        pipe->InitBuffer(dy_buffer_, columns * sizeof(float));
        pipe->InitBuffer(rounded_buffer_, columns * sizeof(T));
        x_wide_ = x_buffer_.template Get<float>();
        dy_wide_ = dy_buffer_.template Get<float>();
        rounded_ = rounded_buffer_.template Get<T>();
    }

    __aicore__ inline void Process() {
        const int64_t step = tiling_.tile_columns;
        for (int64_t first = AscendC::GetBlockIdx() * step; first < tiling_.hidden; first += AscendC::GetBlockNum() * step) {
            const int64_t left = tiling_.hidden - first;
            Column(first, uint32_t(left < step ? left : step));
        }
    }

 private:
    static constexpr int64_t kRstdTogether = 1024;

    RmsNormTiling tiling_;
    AscendC::GlobalTensor<T> dy_, x_;
    AscendC::GlobalTensor<float> rstd_, dw_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;  // one row: [x | dy]
    AscendC::TQue<AscendC::TPosition::VECIN, 1> in_rstd_, in_sum_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> out_sum_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> x_buffer_, dy_buffer_, rounded_buffer_;
    AscendC::LocalTensor<float> x_wide_, dy_wide_;
    AscendC::LocalTensor<T> rounded_;

    __aicore__ inline void Column(int64_t first, uint32_t count) {
        const AscendC::DataCopyExtParams copy(1, uint32_t(count * sizeof(float)), 0, 0, 0);
        AscendC::LocalTensor<float> start = in_sum_.template AllocTensor<float>();
        AscendC::DataCopyPad(start, dw_[uint64_t(first)], copy, AscendC::DataCopyPadExtParams<float>());
        in_sum_.EnQue(start);
        start = in_sum_.template DeQue<float>();
        AscendC::LocalTensor<float> sum = out_sum_.template AllocTensor<float>();
        AscendC::Adds(sum, start, -0.0f, int32_t(count));
        in_sum_.FreeTensor(start);
        for (int64_t row = 0; row < tiling_.rows; row += kRstdTogether) Rows(row, first, count, sum);
        out_sum_.EnQue(sum);
        sum = out_sum_.template DeQue<float>();
        AscendC::DataCopyPad(dw_[uint64_t(first)], sum, copy);
        out_sum_.FreeTensor(sum);
    }

    __aicore__ inline void Rows(int64_t first_row, int64_t first, uint32_t count, const AscendC::LocalTensor<float>& sum) {
        const int64_t left = tiling_.rows - first_row, rows = left < kRstdTogether ? left : kRstdTogether;
        AscendC::LocalTensor<float> rstd = in_rstd_.template AllocTensor<float>();
        AscendC::DataCopyPad(rstd, rstd_[uint64_t(first_row)], AscendC::DataCopyExtParams(1, uint32_t(rows * sizeof(float)), 0, 0, 0),
                             AscendC::DataCopyPadExtParams<float>());
        in_rstd_.EnQue(rstd);
        rstd = in_rstd_.template DeQue<float>();
        AscendC::SetFlag<AscendC::HardEvent::MTE2_S>(0);
        AscendC::WaitFlag<AscendC::HardEvent::MTE2_S>(0);
        for (int64_t r = 0; r < rows; ++r) AddRow(first_row + r, rstd.GetValue(uint32_t(r)), first, count, sum);
        AscendC::SetFlag<AscendC::HardEvent::S_MTE2>(0);  // the scalar unit has read rstd
        AscendC::WaitFlag<AscendC::HardEvent::S_MTE2>(0);
        in_rstd_.FreeTensor(rstd);
    }

    __aicore__ inline void AddRow(int64_t row, float rstd, int64_t first, uint32_t count, const AscendC::LocalTensor<float>& sum) {
        const AscendC::DataCopyExtParams copy(1, uint32_t(count * sizeof(T)), 0, 0, 0);
        const int64_t source = row / tiling_.inner * tiling_.outer_stride + row % tiling_.inner * tiling_.inner_stride;
        AscendC::LocalTensor<T> in = in_.template AllocTensor<T>();
        AscendC::DataCopyPad(in, x_[uint64_t(source + first)], copy, AscendC::DataCopyPadExtParams<T>());
        AscendC::DataCopyPad(in[uint32_t(tiling_.tile_columns)], dy_[uint64_t(row * tiling_.hidden + first)], copy,
                             AscendC::DataCopyPadExtParams<T>());
        in_.EnQue(in);
        in = in_.template DeQue<T>();
        AscendC::Cast(x_wide_, in, AscendC::RoundMode::CAST_NONE, count);
        AscendC::Cast(dy_wide_, in[uint32_t(tiling_.tile_columns)], AscendC::RoundMode::CAST_NONE, count);
        AscendC::PipeBarrier<PIPE_V>();
        in_.FreeTensor(in);
        AscendC::Muls(x_wide_, x_wide_, rstd, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(rounded_, x_wide_, AscendC::RoundMode::CAST_RINT, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(x_wide_, rounded_, AscendC::RoundMode::CAST_NONE, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mul(dy_wide_, dy_wide_, x_wide_, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(sum, sum, dy_wide_, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
    }
};

}  // namespace megatron_ext
