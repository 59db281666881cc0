// A step of beam search (megatron_ext/reference/sampling.py: beam_step). A block owns whole requests. Continuations come tile by tile in the order of
// beam and token; of a tile, the best one is taken out until none is better than the worst of those that are kept.
#pragma once
#include "kernel_operator.h"
#include "sampling_tiling.h"

namespace megatron_ext {

constexpr uint32_t kBeamRepeat = 64;  // fp32 lanes that a comparison reads together
constexpr uint32_t kBeamWords = uint32_t(kBeamMaxKept);

class BeamStep {
 public:
    __aicore__ inline void Init(GM_ADDR scores, GM_ADDR logprobs, GM_ADDR kept_scores, GM_ADDR parents, GM_ADDR tokens, const BeamTiling& tiling,
                                AscendC::TPipe* pipe) {
        tiling_ = tiling;
        kept_ = uint32_t(tiling.kept);
        const uint64_t rows = uint64_t(tiling.requests * tiling.beams), results = uint64_t(tiling.requests * tiling.kept);
        scores_.SetGlobalBuffer((__gm__ float*)scores, rows);
        logprobs_.SetGlobalBuffer((__gm__ float*)logprobs, rows * uint64_t(tiling.columns));
        kept_scores_.SetGlobalBuffer((__gm__ float*)kept_scores, results);
        parents_.SetGlobalBuffer((__gm__ int32_t*)parents, 2 * results);  // int64: two words
        tokens_.SetGlobalBuffer((__gm__ int32_t*)tokens, 2 * results);
        pipe->InitBuffer(in_, 2, kSamplingTile * sizeof(float));
        pipe->InitBuffer(out_, 2, 5 * kBeamWords * sizeof(int32_t));
        pipe->InitBuffer(total_buffer_, kSamplingTile * sizeof(float));
        pipe->InitBuffer(number_buffer_, kSamplingTile / 8);
        pipe->InitBuffer(scratch_buffer_, 2 * kSamplingTile / kBeamRepeat * sizeof(float));
        pipe->InitBuffer(best_buffer_, 32);
        total_ = total_buffer_.Get<float>();
        is_number_ = number_buffer_.Get<uint8_t>();
        scratch_ = scratch_buffer_.Get<float>();
        best_ = best_buffer_.Get<float>();
    }

    __aicore__ inline void Process() {
        for (int64_t request = AscendC::GetBlockIdx(); request < tiling_.requests; request += AscendC::GetBlockNum()) {
            for (uint32_t i = 0; i < kept_; ++i) list_[i] = {-__builtin_inff(), -1, -1};
            for (int64_t beam = 0; beam < tiling_.beams; ++beam)
                for (int64_t first = 0; first < tiling_.columns; first += kSamplingTile) {
                    const int64_t left = tiling_.columns - first;
                    const uint32_t count = uint32_t(left < kSamplingTile ? left : kSamplingTile);
                    Totals(request * tiling_.beams + beam, first, count);
                    Keep(int32_t(beam), int32_t(first), count);
                }
            CopyOut(request);
        }
    }

 private:
    struct Continuation {
        float score;
        int32_t parent, token;
    };

    BeamTiling tiling_;
    uint32_t kept_;
    Continuation list_[kBeamMaxKept];  // the best one first
    AscendC::GlobalTensor<float> scores_, logprobs_, kept_scores_;
    AscendC::GlobalTensor<int32_t> parents_, tokens_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;  // [scores | parents | tokens]
    AscendC::TBuf<AscendC::TPosition::VECCALC> total_buffer_, number_buffer_, scratch_buffer_, best_buffer_;
    AscendC::LocalTensor<float> total_, scratch_, best_;
    AscendC::LocalTensor<uint8_t> is_number_;

    __aicore__ inline void VectorToScalar() const {
        AscendC::SetFlag<AscendC::HardEvent::V_S>(0);
        AscendC::WaitFlag<AscendC::HardEvent::V_S>(0);
    }
    __aicore__ inline void ScalarToVector() const {
        AscendC::SetFlag<AscendC::HardEvent::S_V>(0);
        AscendC::WaitFlag<AscendC::HardEvent::S_V>(0);
    }

    // total = logprob + score, -inf instead of NaN and up to the end of a repeat
    __aicore__ inline void Totals(int64_t row, int64_t first, uint32_t count) {
        const uint32_t padded = (count + kBeamRepeat - 1) / kBeamRepeat * kBeamRepeat;
        AscendC::LocalTensor<float> x = in_.AllocTensor<float>();
        AscendC::DataCopyPad(x, logprobs_[uint64_t(row * tiling_.columns + first)], AscendC::DataCopyExtParams(1, uint32_t(count * sizeof(float)), 0, 0, 0),
                             AscendC::DataCopyPadExtParams<float>());
        in_.EnQue(x);
        x = in_.DeQue<float>();
        if (padded > count) {
            AscendC::Duplicate(total_[padded - kBeamRepeat], -__builtin_inff(), int32_t(kBeamRepeat));
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::Adds(total_, x, scores_.GetValue(uint64_t(row)), int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        in_.FreeTensor(x);
        AscendC::Compare(is_number_, total_, total_, AscendC::CMPMODE::EQ, padded);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Select(total_, is_number_, total_, -__builtin_inff(), AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, padded);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // ReduceMax documents the lowest index among equal values.
    __aicore__ inline void Keep(int32_t beam, int32_t first, uint32_t count) {
        for (bool better = true; better;) {
            AscendC::ReduceMax(best_, total_, scratch_, int32_t(count), true);
            VectorToScalar();
            const float score = best_.GetValue(0);
            const uint32_t index = best_.ReinterpretCast<uint32_t>().GetValue(1);
            total_.SetValue(index, -__builtin_inff());
            ScalarToVector();
            better = score > list_[kept_ - 1].score;
            if (better) Insert({score, beam, first + int32_t(index)});
        }
    }

    // Behind equal ones, which came before.
    __aicore__ inline void Insert(const Continuation& continuation) {
        uint32_t at = kept_ - 1;
        for (; at > 0 && continuation.score > list_[at - 1].score; --at) list_[at] = list_[at - 1];
        list_[at] = continuation;
    }

    __aicore__ inline void CopyOut(int64_t request) {
        AscendC::LocalTensor<int32_t> out = out_.AllocTensor<int32_t>();
        AscendC::Duplicate(out, 0, int32_t(5 * kBeamWords));
        VectorToScalar();
        for (uint32_t i = 0; i < kept_; ++i) {
            out.ReinterpretCast<float>().SetValue(i, list_[i].score);
            Word(out, kBeamWords + 2 * i, list_[i].parent);
            Word(out, 3 * kBeamWords + 2 * i, list_[i].token);
        }
        ScalarToVector();
        out_.EnQue(out);
        out = out_.DeQue<int32_t>();
        const uint64_t at = uint64_t(request) * kept_;
        const AscendC::DataCopyExtParams words(1, uint32_t(2 * kept_ * sizeof(int32_t)), 0, 0, 0);
        AscendC::DataCopyPad(kept_scores_[at], out.ReinterpretCast<float>(), AscendC::DataCopyExtParams(1, uint32_t(kept_ * sizeof(float)), 0, 0, 0));
        AscendC::DataCopyPad(parents_[2 * at], out[kBeamWords], words);
        AscendC::DataCopyPad(tokens_[2 * at], out[3 * kBeamWords], words);
        out_.FreeTensor(out);
    }

    // -1 or a number from 0 on, as an int64
    __aicore__ inline void Word(const AscendC::LocalTensor<int32_t>& out, uint32_t at, int32_t value) const {
        out.SetValue(at, value);
        out.SetValue(at + 1, value < 0 ? -1 : 0);
    }
};

}  // namespace megatron_ext
