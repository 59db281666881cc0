// Gradient of a token's logprob by its row of logits: grad * (onehot - exp(x / t - m) / sum), rounded to the dtype of the result.
#pragma once
#include "logprob_kernel.h"

namespace megatron_ext {

template <typename Out>
class VocabDlogits {
 public:
    // grad has been divided by the temperature already.
    __aicore__ inline void Init(GM_ADDR logits, GM_ADDR temperature, GM_ADDR row_max, GM_ADDR exp_sum, GM_ADDR targets, GM_ADDR grad,
                                GM_ADDR dlogits, const LogprobTiling& tiling, AscendC::TPipe* pipe) {
        rows_.Init(logits, temperature, tiling, pipe);
        row_max_.SetGlobalBuffer((__gm__ float*)row_max, uint64_t(tiling.rows));
        exp_sum_.SetGlobalBuffer((__gm__ float*)exp_sum, uint64_t(tiling.rows));
        targets_.SetGlobalBuffer((__gm__ int64_t*)targets, uint64_t(tiling.rows));
        grad_.SetGlobalBuffer((__gm__ float*)grad, uint64_t(tiling.rows));
        dlogits_.SetGlobalBuffer((__gm__ Out*)dlogits, uint64_t(tiling.rows * tiling.columns));
        pipe->InitBuffer(out_, 2, kLogprobTile * sizeof(Out));
        pipe->InitBuffer(denominator_buffer_, kLogprobTile * sizeof(float));
        pipe->InitBuffer(work_buffer_, kLogprobTile * sizeof(float));
        denominator_ = denominator_buffer_.template Get<float>();
        work_ = work_buffer_.template Get<float>();
    }

    __aicore__ inline void Process() {
        for (int64_t row = AscendC::GetBlockIdx(); row < rows_.tiling_.rows; row += AscendC::GetBlockNum()) {
            const uint64_t at = uint64_t(row);
            rows_.Row(row);
            AscendC::Duplicate(denominator_, exp_sum_.GetValue(at), int32_t(kLogprobTile));
            for (int64_t first = 0; first < rows_.tiling_.valid; first += kLogprobTile)
                Tile(row, first, row_max_.GetValue(at), targets_.GetValue(at), grad_.GetValue(at));
            for (int64_t first = rows_.tiling_.valid; first < rows_.tiling_.columns; first += kLogprobTile) Padding(row, first);
        }
    }

 private:
    LogprobRows rows_;
    AscendC::GlobalTensor<float> row_max_, exp_sum_, grad_;
    AscendC::GlobalTensor<int64_t> targets_;
    AscendC::GlobalTensor<Out> dlogits_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> denominator_buffer_, work_buffer_;
    AscendC::LocalTensor<float> denominator_;  // a tile of the row's sum
    AscendC::LocalTensor<float> work_;

    __aicore__ inline void Tile(int64_t row, int64_t first, float row_max, int64_t target, float grad) {
        const uint32_t count = rows_.TileOf(first, rows_.tiling_.valid);
        AscendC::LocalTensor<float> x = rows_.Load(first, count);
        rows_.BelowMax(x, row_max, count);
        AscendC::Exp(x, x, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Div(x, x, denominator_, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        OneHotMinus(x, target - first, count);
        rows_.in_.FreeTensor(x);
        Store(row, first, count, grad);
    }

    // work = onehot - p: +0 - p is (-p) + 0, and 1 - p is (-p) + 1.
    __aicore__ inline void OneHotMinus(const AscendC::LocalTensor<float>& p, int64_t target, uint32_t count) {
        AscendC::Muls(p, p, -1.0f, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(work_, p, 0.0f, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        if (target < 0 || target >= count) return;
        const uint32_t lane = uint32_t(target) % kLogprobRepeat, repeat = uint32_t(target) - lane;
        uint64_t mask[2] = {uint64_t(1) << lane, 0};
        AscendC::Adds(work_[repeat], p[repeat], 1.0f, mask, 1, AscendC::UnaryRepeatParams(1, 1, 8, 8));
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void Padding(int64_t row, int64_t first) {
        const uint32_t count = rows_.TileOf(first, rows_.tiling_.columns);
        AscendC::Duplicate(work_, 0.0f, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        Store(row, first, count, 1.0f);
    }

    // round(work * grad)
    __aicore__ inline void Store(int64_t row, int64_t first, uint32_t count, float grad) {
        AscendC::LocalTensor<Out> out = out_.template AllocTensor<Out>();
        if constexpr (sizeof(Out) == sizeof(float)) {
            AscendC::Muls(out, work_, grad, int32_t(count));
        } else {
            AscendC::Muls(work_, work_, grad, int32_t(count));
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Cast(out, work_, AscendC::RoundMode::CAST_RINT, count);
        }
        AscendC::PipeBarrier<PIPE_V>();
        out_.EnQue(out);
        out = out_.template DeQue<Out>();
        AscendC::DataCopyPad(dlogits_[uint64_t(row * rows_.tiling_.columns + first)], out,
                             AscendC::DataCopyExtParams(1, uint32_t(count * sizeof(Out)), 0, 0, 0));
        out_.FreeTensor(out);
    }
};

}  // namespace megatron_ext
