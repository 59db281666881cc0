// Generalized advantage estimation and discounted returns (megatron_ext/reference/returns.py): one scan from the last token of a sequence to its
// first. A block owns 64 sequences, which are the lanes of a vector, so nothing crosses a core.
#pragma once
#include "kernel_operator.h"
#include "returns_tiling.h"

namespace megatron_ext {

// kValues: advantages by values, and returns; else discounted returns alone.
template <bool kValues>
class Scan {
 public:
    __aicore__ inline void Init(GM_ADDR rewards, GM_ADDR values, GM_ADDR mask, GM_ADDR bootstrap, GM_ADDR advantages, GM_ADDR returns,
                                const ScanTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        const uint64_t size = uint64_t(tiling.sequences * tiling.steps);
        rewards_.SetGlobalBuffer((__gm__ float*)rewards, size);
        values_.SetGlobalBuffer((__gm__ float*)values, size);
        mask_.SetGlobalBuffer((__gm__ float*)mask, size);
        bootstrap_.SetGlobalBuffer((__gm__ float*)bootstrap, uint64_t(tiling.sequences));
        advantages_.SetGlobalBuffer((__gm__ float*)advantages, size);
        returns_.SetGlobalBuffer((__gm__ float*)returns, size);
        pipe->InitBuffer(in_, 2, kOperands * kTile * sizeof(float));
        pipe->InitBuffer(out_, 2, kResults * kTile * sizeof(float));
        pipe->InitBuffer(in_bootstrap_, 1, kLanes * sizeof(float));
        pipe->InitBuffer(state_buffer_, 5 * kLanes * sizeof(float));
        pipe->InitBuffer(bits_buffer_, 32);
        running_ = state_buffer_.template Get<float>();
        next_value_ = running_[kLanes];
        step_ = next_value_[kLanes];
        decayed_ = step_[kLanes];
        kept_row_ = decayed_[kLanes];
        kept_ = bits_buffer_.template Get<uint8_t>();
        AscendC::Duplicate(kept_row_, 0.0f, int32_t(kLanes));  // Compares reads a whole repeat
    }

    __aicore__ inline void Process() {
        for (int64_t first = AscendC::GetBlockIdx() * kScanLanes; first < tiling_.sequences; first += AscendC::GetBlockNum() * kScanLanes) {
            const int64_t left = tiling_.sequences - first;
            count_ = uint32_t(left < kScanLanes ? left : kScanLanes);
            Start(first);
            for (int64_t end = tiling_.steps; end > 0; end -= kScanSteps) {
                const int64_t begin = end > kScanSteps ? end - kScanSteps : 0;
                CopyIn(begin, uint32_t(end - begin), first);
                Compute(uint32_t(end - begin));
                CopyOut(begin, uint32_t(end - begin), first);
            }
        }
    }

 private:
    static constexpr uint32_t kLanes = uint32_t(kScanLanes), kTile = uint32_t(kScanLanes * kScanSteps);
    static constexpr uint32_t kOperands = kValues ? 3 : 2, kResults = kValues ? 2 : 1;  // rewards, mask, values; returns, advantages

    ScanTiling tiling_;
    uint32_t count_;  // sequences of this block
    AscendC::GlobalTensor<float> rewards_, values_, mask_, bootstrap_, advantages_, returns_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;  // tiles [rewards | mask | values], a repeat for each step
    AscendC::TQue<AscendC::TPosition::VECIN, 1> in_bootstrap_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;  // [returns | advantages]
    AscendC::TBuf<AscendC::TPosition::VECCALC> state_buffer_, bits_buffer_;
    AscendC::LocalTensor<float> running_, next_value_;  // what the scan carries: the advantage or return, and the value, behind a step
    AscendC::LocalTensor<float> step_, decayed_, kept_row_;
    AscendC::LocalTensor<uint8_t> kept_;

    __aicore__ inline void Start(int64_t first) {
        AscendC::LocalTensor<float> in = in_bootstrap_.template AllocTensor<float>();
        AscendC::DataCopyPad(in, bootstrap_[uint64_t(first)], AscendC::DataCopyExtParams(1, uint32_t(count_ * sizeof(float)), 0, 0, 0),
                             AscendC::DataCopyPadExtParams<float>());
        in_bootstrap_.EnQue(in);
        in = in_bootstrap_.template DeQue<float>();
        AscendC::PipeBarrier<PIPE_V>();  // what the sequences before have carried
        AscendC::Adds(kValues ? next_value_ : running_, in, -0.0f, int32_t(count_));
        if constexpr (kValues) AscendC::Duplicate(running_, 0.0f, int32_t(count_));
        in_bootstrap_.FreeTensor(in);
    }

    __aicore__ inline void Load(const AscendC::LocalTensor<float>& to, const AscendC::GlobalTensor<float>& from, int64_t begin, uint32_t steps,
                                int64_t first) const {
        const uint32_t blocks = (count_ + 7) / 8;
        const AscendC::DataCopyExtParams copy(uint16_t(steps), uint32_t(count_ * sizeof(float)), uint32_t((tiling_.sequences - count_) * sizeof(float)),
                                              kLanes / 8 - blocks, 0);
        AscendC::DataCopyPad(to, from[uint64_t(begin * tiling_.sequences + first)], copy, AscendC::DataCopyPadExtParams<float>());
    }

    __aicore__ inline void CopyIn(int64_t begin, uint32_t steps, int64_t first) {
        AscendC::LocalTensor<float> in = in_.template AllocTensor<float>();
        Load(in, rewards_, begin, steps, first);
        Load(in[kTile], mask_, begin, steps, first);
        if constexpr (kValues) Load(in[2 * kTile], values_, begin, steps, first);
        in_.EnQue(in);
    }

    __aicore__ inline void Compute(uint32_t steps) {
        AscendC::LocalTensor<float> in = in_.template DeQue<float>();
        AscendC::LocalTensor<float> out = out_.template AllocTensor<float>();
        for (uint32_t i = steps; i > 0; --i) {
            const uint32_t at = (i - 1) * kLanes;
            Keep(in[kTile + at]);
            if constexpr (kValues)
                Advantage(in[at], in[2 * kTile + at], out[at], out[kTile + at]);
            else
                Return(in[at], out[at]);
        }
        in_.FreeTensor(in);
        out_.EnQue(out);
    }

    // Sets a bit for every sequence whose token is kept.
    __aicore__ inline void Keep(const AscendC::LocalTensor<float>& mask) const {
        AscendC::Adds(kept_row_, mask, -0.0f, int32_t(count_));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Compares(kept_, kept_row_, 0.0f, AscendC::CMPMODE::NE, kLanes);
    }

    // running = reward + gamma * running
    __aicore__ inline void Return(const AscendC::LocalTensor<float>& reward, const AscendC::LocalTensor<float>& out) const {
        AscendC::Muls(step_, running_, tiling_.gamma, int32_t(count_));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(step_, reward, step_, int32_t(count_));
        AscendC::PipeBarrier<PIPE_V>();
        Carry(running_, step_);
        Result(out, step_);
    }

    // running = ((reward + gamma * next value) - value) + decay * running
    __aicore__ inline void Advantage(const AscendC::LocalTensor<float>& reward, const AscendC::LocalTensor<float>& value,
                                     const AscendC::LocalTensor<float>& returns, const AscendC::LocalTensor<float>& advantages) const {
        AscendC::Muls(step_, next_value_, tiling_.gamma, int32_t(count_));
        AscendC::Muls(decayed_, running_, tiling_.decay, int32_t(count_));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(step_, reward, step_, int32_t(count_));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(step_, step_, value, int32_t(count_));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(step_, step_, decayed_, int32_t(count_));
        AscendC::PipeBarrier<PIPE_V>();
        Carry(running_, step_);
        Carry(next_value_, value);
        Result(advantages, step_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(step_, running_, value, int32_t(count_));
        AscendC::PipeBarrier<PIPE_V>();
        Result(returns, step_);
    }

    // A token that is left out leaves what is carried as it is, and its result is +0.
    __aicore__ inline void Carry(const AscendC::LocalTensor<float>& state, const AscendC::LocalTensor<float>& x) const {
        AscendC::Select(state, kept_, x, state, AscendC::SELMODE::VSEL_TENSOR_TENSOR_MODE, count_);
    }
    __aicore__ inline void Result(const AscendC::LocalTensor<float>& out, const AscendC::LocalTensor<float>& x) const {
        AscendC::Select(out, kept_, x, 0.0f, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, count_);
    }

    __aicore__ inline void Store(const AscendC::GlobalTensor<float>& to, const AscendC::LocalTensor<float>& from, int64_t begin, uint32_t steps,
                                 int64_t first) const {
        const uint32_t blocks = (count_ + 7) / 8;
        const AscendC::DataCopyExtParams copy(uint16_t(steps), uint32_t(count_ * sizeof(float)), kLanes / 8 - blocks,
                                              uint32_t((tiling_.sequences - count_) * sizeof(float)), 0);
        AscendC::DataCopyPad(to[uint64_t(begin * tiling_.sequences + first)], from, copy);
    }

    __aicore__ inline void CopyOut(int64_t begin, uint32_t steps, int64_t first) {
        AscendC::LocalTensor<float> out = out_.template DeQue<float>();
        Store(returns_, out, begin, steps, first);
        if constexpr (kValues) Store(advantages_, out[kTile], begin, steps, first);
        out_.FreeTensor(out);
    }
};

}  // namespace megatron_ext
