// RMSNorm, add + RMSNorm and the gradients, in the order and with the roundings of megatron_ext/reference/norm.py. Legend: H hidden,
// S row stride in UB (H rounded up to a DataBlock), B H rounded up to whole repeats of 64.
#pragma once
#include "kernel_operator.h"
#include "rms_norm_tiling.h"

namespace megatron_ext {

constexpr uint32_t kRmsNormRepeat = MEGATRON_EXT_ROW_SUM_BLOCK;  // fp32 lanes of a repeat, which ReduceSum adds as one tree

// Row geometry and 1 / rms, which all three kernels share.
template <typename T>
class RmsNormRows {
 public:
    __aicore__ inline void Init(const RmsNormTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        h_ = uint32_t(tiling.hidden);
        stride_ = RoundUp(h_, 32 / sizeof(T));
        repeats_ = RoundUp(h_, kRmsNormRepeat);
        pipe->InitBuffer(terms_buffer_, repeats_ * sizeof(float));
        pipe->InitBuffer(rstd_buffer_, kRmsNormMaxTileRows * sizeof(float));
        pipe->InitBuffer(constants_buffer_, 2 * kRmsNormMaxTileRows * sizeof(float));
        pipe->InitBuffer(scratch_buffer_, RoundUp(repeats_ / kRmsNormRepeat, 8) * sizeof(float));
        terms_ = terms_buffer_.template Get<float>();
        rstd_ = rstd_buffer_.template Get<float>();
        width_ = constants_buffer_.template Get<float>();
        one_ = width_[kRmsNormMaxTileRows];
        scratch_ = scratch_buffer_.template Get<float>();
        AscendC::Duplicate(terms_, 0.0f, int32_t(repeats_));  // lanes from H on stay +0: a masked lane in a sum tree is undocumented
        AscendC::Duplicate(width_, float(h_), int32_t(kRmsNormMaxTileRows));
        AscendC::Duplicate(one_, 1.0f, int32_t(kRmsNormMaxTileRows));
    }

    // Tiles of the launch: every outer index is cut by itself.
    __aicore__ inline int64_t Tiles() const { return tiling_.rows / tiling_.inner * TilesOfOuter(); }
    __aicore__ inline int64_t FirstRow(int64_t tile) const {
        return tile / TilesOfOuter() * tiling_.inner + tile % TilesOfOuter() * tiling_.tile_rows;
    }
    __aicore__ inline uint32_t RowsOf(int64_t tile) const {
        const int64_t left = tiling_.inner - tile % TilesOfOuter() * tiling_.tile_rows;
        return uint32_t(left < tiling_.tile_rows ? left : tiling_.tile_rows);
    }
    // Where a row of x starts.
    __aicore__ inline uint64_t Source(int64_t row) const {
        return uint64_t(row / tiling_.inner * tiling_.outer_stride + row % tiling_.inner * tiling_.inner_stride);
    }

    __aicore__ inline void Load(const AscendC::LocalTensor<T>& to, const AscendC::GlobalTensor<T>& from, int64_t row_stride, uint32_t rows) const {
        const AscendC::DataCopyExtParams copy(uint16_t(rows), h_ * sizeof(T), uint32_t((row_stride - h_) * sizeof(T)), 0, 0);
        AscendC::DataCopyPad(to, from, copy, AscendC::DataCopyPadExtParams<T>());
    }
    __aicore__ inline void Store(const AscendC::GlobalTensor<T>& to, const AscendC::LocalTensor<T>& from, uint32_t rows) const {
        AscendC::DataCopyPad(to, from, AscendC::DataCopyExtParams(uint16_t(rows), h_ * sizeof(T), 0, 0, 0));
    }

    // x[r] += residual[r], through the room of one row
    __aicore__ inline void AddRows(const AscendC::LocalTensor<float>& x, const AscendC::LocalTensor<T>& residual, uint32_t rows) const {
        for (uint32_t r = 0; r < rows; ++r) {
            AscendC::Cast(terms_, residual[r * stride_], AscendC::RoundMode::CAST_NONE, h_);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Add(x[r * stride_], x[r * stride_], terms_, int32_t(h_));
            AscendC::PipeBarrier<PIPE_V>();
        }
    }

    // out[r] = sum of a[r][i] * b[r][i] in blocks of 64: ReduceSum by count is the order of reference/sums.py.
    __aicore__ inline void SumOfProducts(const AscendC::LocalTensor<float>& out, const AscendC::LocalTensor<float>& a,
                                         const AscendC::LocalTensor<float>& b, uint32_t rows) const {
        for (uint32_t r = 0; r < rows; ++r) {
            AscendC::Mul(terms_, a[r * stride_], b[r * stride_], int32_t(h_));
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::ReduceSum<float>(out[r], terms_, scratch_, int32_t(repeats_));
            AscendC::PipeBarrier<PIPE_V>();
        }
    }

    // rstd[r] = 1 / sqrt(sum(x[r]^2) / H + eps), each operation rounded; readable by the scalar unit afterwards.
    __aicore__ inline void InverseRms(const AscendC::LocalTensor<float>& x, uint32_t rows) {
        SumOfProducts(rstd_, x, x, rows);
        AscendC::Div(rstd_, rstd_, width_, int32_t(rows));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(rstd_, rstd_, tiling_.eps, int32_t(rows));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sqrt(rstd_, rstd_, int32_t(rows));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Div(rstd_, one_, rstd_, int32_t(rows));
        VectorToScalar();
    }

    // x[r] *= factor[r]
    __aicore__ inline void ScaleRows(const AscendC::LocalTensor<float>& x, const AscendC::LocalTensor<float>& factor, uint32_t rows) const {
        for (uint32_t r = 0; r < rows; ++r) AscendC::Muls(x[r * stride_], x[r * stride_], factor.GetValue(r), int32_t(h_));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::SetFlag<AscendC::HardEvent::S_V>(0);  // factor has been read
        AscendC::WaitFlag<AscendC::HardEvent::S_V>(0);
    }

    // x[r] *= w
    __aicore__ inline void MultiplyRows(const AscendC::LocalTensor<float>& x, const AscendC::LocalTensor<float>& w, uint32_t rows) const {
        for (uint32_t r = 0; r < rows; ++r) AscendC::Mul(x[r * stride_], x[r * stride_], w, int32_t(h_));
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void VectorToScalar() const {
        AscendC::SetFlag<AscendC::HardEvent::V_S>(0);
        AscendC::WaitFlag<AscendC::HardEvent::V_S>(0);
    }

    static __aicore__ inline uint32_t RoundUp(uint32_t n, uint32_t multiple) { return (n + multiple - 1) / multiple * multiple; }

    RmsNormTiling tiling_;
    uint32_t h_, stride_, repeats_;
    AscendC::LocalTensor<float> rstd_;  // [tile rows]
    AscendC::LocalTensor<float> width_;

 private:
    AscendC::TBuf<AscendC::TPosition::VECCALC> terms_buffer_, rstd_buffer_, constants_buffer_, scratch_buffer_;
    AscendC::LocalTensor<float> terms_, one_, scratch_;

    __aicore__ inline int64_t TilesOfOuter() const { return (tiling_.inner + tiling_.tile_rows - 1) / tiling_.tile_rows; }
};

// The weight in fp32, loaded once.
template <typename T>
class RmsNormWeight {
 public:
    __aicore__ inline void Init(GM_ADDR weight, const RmsNormRows<T>& rows, AscendC::TPipe* pipe) {
        AscendC::GlobalTensor<T> source;
        source.SetGlobalBuffer((__gm__ T*)weight, rows.h_);
        pipe->InitBuffer(in_, 1, rows.stride_ * sizeof(T));
        pipe->InitBuffer(wide_buffer_, rows.stride_ * sizeof(float));
        wide_ = wide_buffer_.template Get<float>();
        AscendC::LocalTensor<T> narrow = in_.template AllocTensor<T>();
        rows.Load(narrow, source, rows.h_, 1);
        in_.EnQue(narrow);
        narrow = in_.template DeQue<T>();
        AscendC::Cast(wide_, narrow, AscendC::RoundMode::CAST_NONE, rows.h_);
        in_.FreeTensor(narrow);
    }

    AscendC::LocalTensor<float> wide_;  // [H]

 private:
    AscendC::TQue<AscendC::TPosition::VECIN, 1> in_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> wide_buffer_;
};

// kAdd: the sum of x and the residual is rounded to the model dtype, stored, and normalised.
template <typename T, bool kAdd>
class RmsNorm {
 public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR residual, GM_ADDR weight, GM_ADDR y, GM_ADDR sum, const RmsNormTiling& tiling,
                                AscendC::TPipe* pipe) {
        rows_.Init(tiling, pipe);
        weight_.Init(weight, rows_, pipe);
        x_.SetGlobalBuffer((__gm__ T*)x);
        y_.SetGlobalBuffer((__gm__ T*)y, uint64_t(tiling.rows * tiling.hidden));
        const uint32_t elements = uint32_t(tiling.tile_rows) * rows_.stride_;
        const uint8_t depth = elements > kRmsNormTileElements ? 1 : 2;  // long rows leave no room for double buffering
        pipe->InitBuffer(in_x_, depth, elements * sizeof(T));
        pipe->InitBuffer(out_y_, depth, elements * sizeof(T));
        pipe->InitBuffer(work_buffer_, elements * sizeof(float));
        work_ = work_buffer_.template Get<float>();
        if constexpr (kAdd) {
            residual_.SetGlobalBuffer((__gm__ T*)residual, uint64_t(tiling.rows * tiling.hidden));
            sum_.SetGlobalBuffer((__gm__ T*)sum, uint64_t(tiling.rows * tiling.hidden));
            pipe->InitBuffer(in_residual_, depth, elements * sizeof(T));
            pipe->InitBuffer(out_sum_, 1, elements * sizeof(T));
        }
    }

    __aicore__ inline void Process() {
        for (int64_t tile = AscendC::GetBlockIdx(); tile < rows_.Tiles(); tile += AscendC::GetBlockNum()) {
            const int64_t first = rows_.FirstRow(tile);
            const uint32_t rows = rows_.RowsOf(tile);
            CopyIn(first, rows);
            if constexpr (kAdd)
                AddResidual(first, rows);
            else
                Widen(rows);
            Compute(rows);
            CopyOut(first, rows);
        }
    }

 private:
    RmsNormRows<T> rows_;
    RmsNormWeight<T> weight_;
    AscendC::GlobalTensor<T> x_, residual_, y_, sum_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_x_, in_residual_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_y_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> out_sum_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> work_buffer_;
    AscendC::LocalTensor<float> work_;

    __aicore__ inline void CopyIn(int64_t first, uint32_t rows) {
        AscendC::LocalTensor<T> x = in_x_.template AllocTensor<T>();
        rows_.Load(x, x_[rows_.Source(first)], rows_.tiling_.inner_stride, rows);
        in_x_.EnQue(x);
        if constexpr (kAdd) {
            AscendC::LocalTensor<T> residual = in_residual_.template AllocTensor<T>();
            rows_.Load(residual, residual_[uint64_t(first) * rows_.h_], rows_.h_, rows);
            in_residual_.EnQue(residual);
        }
    }

    __aicore__ inline void Widen(uint32_t rows) {
        AscendC::LocalTensor<T> x = in_x_.template DeQue<T>();
        AscendC::Cast(work_, x, AscendC::RoundMode::CAST_NONE, rows * rows_.stride_);
        AscendC::PipeBarrier<PIPE_V>();
        in_x_.FreeTensor(x);
    }

    // work = the rounded sum; rounded and widened again because the next layer reads it in the model dtype.
    __aicore__ inline void AddResidual(int64_t first, uint32_t rows) {
        const uint32_t count = rows * rows_.stride_;
        Widen(rows);
        AscendC::LocalTensor<T> residual = in_residual_.template DeQue<T>();
        rows_.AddRows(work_, residual, rows);
        in_residual_.FreeTensor(residual);
        AscendC::LocalTensor<T> sum = out_sum_.template AllocTensor<T>();
        AscendC::Cast(sum, work_, AscendC::RoundMode::CAST_RINT, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(work_, sum, AscendC::RoundMode::CAST_NONE, count);
        AscendC::PipeBarrier<PIPE_V>();
        out_sum_.EnQue(sum);
        sum = out_sum_.template DeQue<T>();
        rows_.Store(sum_[uint64_t(first) * rows_.h_], sum, rows);
        out_sum_.FreeTensor(sum);
    }

    __aicore__ inline void Compute(uint32_t rows) {
        const uint32_t count = rows * rows_.stride_;
        rows_.InverseRms(work_, rows);
        rows_.ScaleRows(work_, rows_.rstd_, rows);
        AscendC::LocalTensor<T> y = out_y_.template AllocTensor<T>();
        AscendC::Cast(y, work_, AscendC::RoundMode::CAST_RINT, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(work_, y, AscendC::RoundMode::CAST_NONE, count);
        AscendC::PipeBarrier<PIPE_V>();
        rows_.MultiplyRows(work_, weight_.wide_, rows);
        AscendC::Cast(y, work_, AscendC::RoundMode::CAST_RINT, count);
        AscendC::PipeBarrier<PIPE_V>();
        out_y_.EnQue(y);
    }

    __aicore__ inline void CopyOut(int64_t first, uint32_t rows) {
        AscendC::LocalTensor<T> y = out_y_.template DeQue<T>();
        rows_.Store(y_[uint64_t(first) * rows_.h_], y, rows);
        out_y_.FreeTensor(y);
    }
};

}  // namespace megatron_ext
