// Maximum, exponent sum and log-probabilities of rows of logits, in the order of megatron_ext/reference/logprob.py. A block owns whole rows,
// so no partial sum crosses a core. Legend: t temperature, m maximum of a row, s a segment.
#pragma once
#include "kernel_operator.h"
#include "logprob_tiling.h"

namespace megatron_ext {

constexpr uint32_t kLogprobRepeat = MEGATRON_EXT_ROW_SUM_BLOCK;  // fp32 lanes of a repeat, which ReduceSum adds as one tree
constexpr uint32_t kLogprobOne = 8;                              // fp32 elements of the smallest buffer, one DataBlock

// One row of logits after another, tile by tile, divided by its temperature on the fly.
class LogprobRows {
 public:
    __aicore__ inline void Init(GM_ADDR logits, GM_ADDR temperature, const LogprobTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        logits_.SetGlobalBuffer((__gm__ float*)logits, uint64_t((tiling.rows - 1) * tiling.row_stride + tiling.columns));
        temperature_.SetGlobalBuffer((__gm__ float*)temperature, uint64_t((tiling.rows - 1) * tiling.temperature_stride + 1));
        pipe->InitBuffer(in_, 2, kLogprobTile * sizeof(float));
        pipe->InitBuffer(divisor_buffer_, kLogprobTile * sizeof(float));
        pipe->InitBuffer(terms_buffer_, kLogprobSumTile * sizeof(float));
        pipe->InitBuffer(sums_buffer_, kLogprobMaxSegments * sizeof(float));
        pipe->InitBuffer(scratch_buffer_, kLogprobTile / kLogprobRepeat * sizeof(float) + kLogprobOne * sizeof(float));
        pipe->InitBuffer(max_buffer_, kLogprobOne * sizeof(float));
        pipe->InitBuffer(sum_buffer_, kLogprobOne * sizeof(float));
        divisor_ = divisor_buffer_.Get<float>();
        terms_ = terms_buffer_.Get<float>();
        sums_ = sums_buffer_.Get<float>();
        scratch_ = scratch_buffer_.Get<float>();
        max_ = max_buffer_.Get<float>();
        sum_ = sum_buffer_.Get<float>();
    }

    // The row that the functions below work on.
    __aicore__ inline void Row(int64_t row) {
        row_ = uint64_t(row * tiling_.row_stride);
        if (!tiling_.scaled) return;
        AscendC::Duplicate(divisor_, temperature_.GetValue(uint64_t(row * tiling_.temperature_stride)), int32_t(kLogprobTile));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // x[0 .. count) from column `first`; give it back by in_.FreeTensor.
    __aicore__ inline AscendC::LocalTensor<float> Load(int64_t first, uint32_t count) {
        AscendC::LocalTensor<float> x = in_.AllocTensor<float>();
        AscendC::DataCopyPad(x, logits_[row_ + uint64_t(first)], AscendC::DataCopyExtParams(1, uint32_t(count * sizeof(float)), 0, 0, 0),
                             AscendC::DataCopyPadExtParams<float>());
        in_.EnQue(x);
        return in_.DeQue<float>();
    }

    // x = x / t - m
    __aicore__ inline void BelowMax(const AscendC::LocalTensor<float>& x, float row_max, uint32_t count) const {
        if (tiling_.scaled) {
            AscendC::Div(x, x, divisor_, int32_t(count));
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::Adds(x, x, -row_max, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // max_[0] = max(x) / t + 0 of at least one valid column: the quotients' maximum is the maximum's quotient, since rounding keeps an order
    // and t > 0.
    __aicore__ inline void Max() {
        for (int64_t first = 0; first < tiling_.valid; first += kLogprobTile) {
            const uint32_t count = TileOf(first, tiling_.valid);
            AscendC::LocalTensor<float> x = Load(first, count);
            if (first == 0)
                AscendC::Adds(terms_, x, 0.0f, int32_t(count));
            else
                AscendC::Max(terms_, terms_, x, int32_t(count));
            AscendC::PipeBarrier<PIPE_V>();
            in_.FreeTensor(x);
        }
        AscendC::ReduceMax(max_, terms_, scratch_, int32_t(TileOf(0, tiling_.valid)));
        AscendC::PipeBarrier<PIPE_V>();
        if (tiling_.scaled) {
            AscendC::Div(max_, max_, divisor_, 1);
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::Adds(max_, max_, 0.0f, 1);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // sum_[0] = the tree over the segments' sums of exp(x / t - m)
    __aicore__ inline void ExpSum(float row_max) {
        AscendC::Duplicate(sums_, 0.0f, int32_t(kLogprobMaxSegments));
        for (int64_t segment = 0; segment < tiling_.segments; ++segment) SegmentSum(segment, row_max);
        AscendC::ReduceSum<float>(sum_, sums_, scratch_, int32_t(kLogprobMaxSegments));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Element 0 as a number of the scalar unit, after what the vector unit was told before and before what it is told next.
    __aicore__ inline float Scalar(const AscendC::LocalTensor<float>& x) const {
        AscendC::SetFlag<AscendC::HardEvent::V_S>(0);
        AscendC::WaitFlag<AscendC::HardEvent::V_S>(0);
        const float value = x.GetValue(0);
        AscendC::SetFlag<AscendC::HardEvent::S_V>(0);
        AscendC::WaitFlag<AscendC::HardEvent::S_V>(0);
        return value;
    }

    static __aicore__ inline uint32_t TileOf(int64_t first, int64_t end) { return uint32_t(end - first < kLogprobTile ? end - first : kLogprobTile); }

    LogprobTiling tiling_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;
    AscendC::GlobalTensor<float> logits_;
    AscendC::LocalTensor<float> divisor_;  // a tile of t
    AscendC::LocalTensor<float> max_, sum_;
    uint64_t row_;  // where the row starts

 private:
    AscendC::GlobalTensor<float> temperature_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> divisor_buffer_, terms_buffer_, sums_buffer_, scratch_buffer_, max_buffer_, sum_buffer_;
    AscendC::LocalTensor<float> terms_, sums_, scratch_;

    // The running sum is lane 0 of a repeat of its own, in front of a tile's terms: ReduceSum then goes on where the last tile ended, and
    // blocks of 64 are added one after another as in row_sum.
    __aicore__ inline void SegmentSum(int64_t segment, float row_max) {
        const int64_t begin = segment * tiling_.segment, whole = begin + tiling_.segment, end = whole < tiling_.valid ? whole : tiling_.valid;
        if (begin >= end) return;  // padding as a whole: its sum is +0 already
        AscendC::Duplicate(terms_, 0.0f, int32_t(kLogprobRepeat));
        for (int64_t first = begin; first < end; first += kLogprobTile) {
            const uint32_t count = TileOf(first, end), padded = (count + kLogprobRepeat - 1) / kLogprobRepeat * kLogprobRepeat;
            // +0 beyond the tokens: a masked lane in a sum tree is undocumented
            if (padded > count) AscendC::Duplicate(terms_[padded], 0.0f, int32_t(kLogprobRepeat));
            AscendC::LocalTensor<float> x = Load(first, count);
            BelowMax(x, row_max, count);
            AscendC::Exp(terms_[kLogprobRepeat], x, int32_t(count));
            AscendC::PipeBarrier<PIPE_V>();
            in_.FreeTensor(x);
            AscendC::ReduceSum<float>(sum_, terms_, scratch_, int32_t(kLogprobRepeat + padded));
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Adds(terms_, sum_, 0.0f, 1);
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::ReduceSum<float>(sums_[uint32_t(segment)], terms_, scratch_, int32_t(kLogprobRepeat));
        AscendC::PipeBarrier<PIPE_V>();
    }
};

// One fp32 number a row, written by the vector unit and stored.
class LogprobResult {
 public:
    __aicore__ inline void Init(GM_ADDR result, int64_t rows, AscendC::TPipe* pipe) {
        result_.SetGlobalBuffer((__gm__ float*)result, uint64_t(rows));
        pipe->InitBuffer(out_, 2, kLogprobOne * sizeof(float));
    }
    __aicore__ inline void Store(int64_t row, const AscendC::LocalTensor<float>& value) {
        AscendC::LocalTensor<float> out = out_.AllocTensor<float>();
        AscendC::Adds(out, value, -0.0f, 1);  // a copy that keeps the sign of zero
        out_.EnQue(out);
        out = out_.DeQue<float>();
        AscendC::DataCopyPad(result_[uint64_t(row)], out, AscendC::DataCopyExtParams(1, sizeof(float), 0, 0, 0));
        out_.FreeTensor(out);
    }

 private:
    AscendC::GlobalTensor<float> result_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;
};

class VocabMax {
 public:
    __aicore__ inline void Init(GM_ADDR logits, GM_ADDR temperature, GM_ADDR row_max, const LogprobTiling& tiling, AscendC::TPipe* pipe) {
        rows_.Init(logits, temperature, tiling, pipe);
        row_max_.Init(row_max, tiling.rows, pipe);
    }
    __aicore__ inline void Process() {
        for (int64_t row = AscendC::GetBlockIdx(); row < rows_.tiling_.rows; row += AscendC::GetBlockNum()) {
            rows_.Row(row);
            rows_.Max();
            row_max_.Store(row, rows_.max_);
        }
    }

 private:
    LogprobRows rows_;
    LogprobResult row_max_;
};

class VocabExpSum {
 public:
    __aicore__ inline void Init(GM_ADDR logits, GM_ADDR temperature, GM_ADDR row_max, GM_ADDR exp_sum, const LogprobTiling& tiling,
                                AscendC::TPipe* pipe) {
        rows_.Init(logits, temperature, tiling, pipe);
        row_max_.SetGlobalBuffer((__gm__ float*)row_max, uint64_t(tiling.rows));
        exp_sum_.Init(exp_sum, tiling.rows, pipe);
    }
    __aicore__ inline void Process() {
        for (int64_t row = AscendC::GetBlockIdx(); row < rows_.tiling_.rows; row += AscendC::GetBlockNum()) {
            rows_.Row(row);
            rows_.ExpSum(row_max_.GetValue(uint64_t(row)));
            exp_sum_.Store(row, rows_.sum_);
        }
    }

 private:
    LogprobRows rows_;
    AscendC::GlobalTensor<float> row_max_;
    LogprobResult exp_sum_;
};

// (x[id] / t - m) - log(sum). An id outside the vocabulary gives NaN.
class TokenLogprob {
 public:
    __aicore__ inline void Init(GM_ADDR logits, GM_ADDR temperature, GM_ADDR ids, GM_ADDR logprob, GM_ADDR row_max, GM_ADDR exp_sum,
                                const LogprobTiling& tiling, AscendC::TPipe* pipe) {
        rows_.Init(logits, temperature, tiling, pipe);
        ids_.SetGlobalBuffer((__gm__ int64_t*)ids, uint64_t(tiling.rows));
        logprob_.Init(logprob, tiling.rows, pipe);
        row_max_.Init(row_max, tiling.rows, pipe);
        exp_sum_.Init(exp_sum, tiling.rows, pipe);
        pipe->InitBuffer(value_buffer_, kLogprobOne * sizeof(float));
        value_ = value_buffer_.Get<float>();
    }
    __aicore__ inline void Process() {
        for (int64_t row = AscendC::GetBlockIdx(); row < rows_.tiling_.rows; row += AscendC::GetBlockNum()) {
            rows_.Row(row);
            rows_.Max();
            const float row_max = rows_.Scalar(rows_.max_);
            rows_.ExpSum(row_max);
            row_max_.Store(row, rows_.max_);
            exp_sum_.Store(row, rows_.sum_);
            Target(ids_.GetValue(uint64_t(row)));
            Compute(row_max);
            logprob_.Store(row, value_);
        }
    }

 private:
    LogprobRows rows_;
    AscendC::GlobalTensor<int64_t> ids_;
    LogprobResult logprob_, row_max_, exp_sum_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> value_buffer_;
    AscendC::LocalTensor<float> value_;

    __aicore__ inline void Target(int64_t id) {
        if (id >= 0 && id < rows_.tiling_.valid)
            AscendC::Duplicate(value_, rows_.logits_.GetValue(rows_.row_ + uint64_t(id)), int32_t(kLogprobOne));
        else
            AscendC::Duplicate(value_, __builtin_nanf(""), int32_t(kLogprobOne));
        AscendC::PipeBarrier<PIPE_V>();
    }
    __aicore__ inline void Compute(float row_max) {
        rows_.BelowMax(value_, row_max, 1);
        AscendC::Ln(rows_.sum_, rows_.sum_, 1);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(value_, value_, rows_.sum_, 1);
        AscendC::PipeBarrier<PIPE_V>();
    }
};

class LogSoftmax {
 public:
    __aicore__ inline void Init(GM_ADDR logits, GM_ADDR temperature, GM_ADDR logprobs, const LogprobTiling& tiling, AscendC::TPipe* pipe) {
        rows_.Init(logits, temperature, tiling, pipe);
        logprobs_.SetGlobalBuffer((__gm__ float*)logprobs, uint64_t(tiling.rows * tiling.columns));
        pipe->InitBuffer(out_, 2, kLogprobTile * sizeof(float));
    }
    __aicore__ inline void Process() {
        for (int64_t row = AscendC::GetBlockIdx(); row < rows_.tiling_.rows; row += AscendC::GetBlockNum()) {
            rows_.Row(row);
            rows_.Max();
            const float row_max = rows_.Scalar(rows_.max_);
            rows_.ExpSum(row_max);
            AscendC::Ln(rows_.sum_, rows_.sum_, 1);
            const float log_sum = rows_.Scalar(rows_.sum_);
            for (int64_t first = 0; first < rows_.tiling_.columns; first += kLogprobTile)
                Tile(row, first, rows_.TileOf(first, rows_.tiling_.columns), row_max, log_sum);
        }
    }

 private:
    LogprobRows rows_;
    AscendC::GlobalTensor<float> logprobs_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;

    __aicore__ inline void Tile(int64_t row, int64_t first, uint32_t count, float row_max, float log_sum) {
        AscendC::LocalTensor<float> x = rows_.Load(first, count);
        AscendC::LocalTensor<float> out = out_.AllocTensor<float>();
        rows_.BelowMax(x, row_max, count);
        AscendC::Adds(out, x, -log_sum, int32_t(count));
        rows_.in_.FreeTensor(x);
        out_.EnQue(out);
        out = out_.DeQue<float>();
        AscendC::DataCopyPad(logprobs_[uint64_t(row * rows_.tiling_.columns + first)], out,
                             AscendC::DataCopyExtParams(1, uint32_t(count * sizeof(float)), 0, 0, 0));
        out_.FreeTensor(out);
    }
};

// Elementwise (x - m) - log(sum) over rows whose parts are known, as across ranks.
class LogprobFromParts {
 public:
    __aicore__ inline void Init(GM_ADDR target, GM_ADDR row_max, GM_ADDR exp_sum, GM_ADDR logprob, const LogprobTiling& tiling,
                                AscendC::TPipe* pipe) {
        rows_ = tiling.rows;
        target_.SetGlobalBuffer((__gm__ float*)target, uint64_t(rows_));
        row_max_.SetGlobalBuffer((__gm__ float*)row_max, uint64_t(rows_));
        exp_sum_.SetGlobalBuffer((__gm__ float*)exp_sum, uint64_t(rows_));
        logprob_.SetGlobalBuffer((__gm__ float*)logprob, uint64_t(rows_));
        pipe->InitBuffer(in_, 2, 3 * kLogprobTile * sizeof(float));
        pipe->InitBuffer(out_, 2, kLogprobTile * sizeof(float));
    }
    __aicore__ inline void Process() {
        for (int64_t first = AscendC::GetBlockIdx() * kLogprobTile; first < rows_; first += AscendC::GetBlockNum() * kLogprobTile)
            Tile(first, LogprobRows::TileOf(first, rows_));
    }

 private:
    int64_t rows_;
    AscendC::GlobalTensor<float> target_, row_max_, exp_sum_, logprob_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;  // [target | max | sum]
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;

    __aicore__ inline void Tile(int64_t first, uint32_t count) {
        const AscendC::DataCopyExtParams copy(1, uint32_t(count * sizeof(float)), 0, 0, 0);
        const uint32_t tile = uint32_t(kLogprobTile);
        AscendC::LocalTensor<float> x = in_.AllocTensor<float>();
        AscendC::DataCopyPad(x, target_[uint64_t(first)], copy, AscendC::DataCopyPadExtParams<float>());
        AscendC::DataCopyPad(x[tile], row_max_[uint64_t(first)], copy, AscendC::DataCopyPadExtParams<float>());
        AscendC::DataCopyPad(x[2 * tile], exp_sum_[uint64_t(first)], copy, AscendC::DataCopyPadExtParams<float>());
        in_.EnQue(x);
        x = in_.DeQue<float>();
        AscendC::LocalTensor<float> out = out_.AllocTensor<float>();
        AscendC::Sub(x, x, x[tile], int32_t(count));
        AscendC::Ln(x[2 * tile], x[2 * tile], int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(out, x, x[2 * tile], int32_t(count));
        in_.FreeTensor(x);
        out_.EnQue(out);
        out = out_.DeQue<float>();
        AscendC::DataCopyPad(logprob_[uint64_t(first)], out, copy);
        out_.FreeTensor(out);
    }
};

}  // namespace megatron_ext
