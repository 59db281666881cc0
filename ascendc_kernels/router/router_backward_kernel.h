// dlogits of a token from the gradients of its weights. Legend: E experts, k slots.
#pragma once
#include "router_kernel.h"

namespace megatron_ext {

class RouterBackward {
 public:
    __aicore__ inline void Init(GM_ADDR dweights, GM_ADDR logits, GM_ADDR ids, GM_ADDR dlogits, const RouterTiling& tiling, AscendC::TPipe* pipe) {
        scores_.Init(logits, tiling, pipe);
        dweights_.SetGlobalBuffer((__gm__ float*)dweights, uint64_t(tiling.tokens * tiling.top_k));
        ids_.SetGlobalBuffer((__gm__ int64_t*)ids, uint64_t(tiling.tokens * tiling.top_k));
        dlogits_.SetGlobalBuffer((__gm__ float*)dlogits, uint64_t(tiling.tokens * tiling.experts));
        const uint32_t slots = scores_.Slots() * kSlot;
        pipe->InitBuffer(in_, 2, slots * sizeof(float));
        pipe->InitBuffer(out_, 2, scores_.room_ * sizeof(float));
        pipe->InitBuffer(chosen_buffer_, slots * sizeof(float));
        pipe->InitBuffer(d_buffer_, slots * sizeof(float));
        pipe->InitBuffer(dot_buffer_, kSlot * sizeof(float));
        pipe->InitBuffer(ds_buffer_, scores_.room_ * sizeof(float));
        chosen_ = chosen_buffer_.Get<float>();
        d_ = d_buffer_.Get<float>();
        dot_ = dot_buffer_.Get<float>();
        ds_ = ds_buffer_.Get<float>();
    }

    __aicore__ inline void Process() {
        for (int64_t token = AscendC::GetBlockIdx(); token < scores_.tiling_.tokens; token += AscendC::GetBlockNum()) {
            scores_.Compute(token);
            Load(token);
            if (scores_.tiling_.renormalize) ThroughRenormalisation(token);
            Scatter(token);
            AscendC::LocalTensor<float> out = out_.AllocTensor<float>();
            if (scores_.tiling_.sigmoid)
                ThroughSigmoid(out);
            else
                ThroughSoftmax(out);
            out_.EnQue(out);
            out = out_.DeQue<float>();
            AscendC::DataCopyPad(dlogits_[uint64_t(token) * scores_.experts_], out, scores_.Row());
            out_.FreeTensor(out);
        }
    }

 private:
    RouterScores scores_;
    AscendC::GlobalTensor<float> dweights_, dlogits_;
    AscendC::GlobalTensor<int64_t> ids_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> chosen_buffer_, d_buffer_, dot_buffer_, ds_buffer_;
    AscendC::LocalTensor<float> chosen_, d_, dot_, ds_;

    __aicore__ inline uint32_t Expert(int64_t token, uint32_t slot) const { return uint32_t(ids_.GetValue(uint64_t(token) * scores_.Slots() + slot)); }

    // d = dweights * scale
    __aicore__ inline void Load(int64_t token) {
        const uint32_t slots = scores_.Slots();
        AscendC::LocalTensor<float> in = in_.AllocTensor<float>();
        AscendC::DataCopyPad(in, dweights_[uint64_t(token) * slots], AscendC::DataCopyExtParams(uint16_t(slots), sizeof(float), 0, 0, 0),
                             AscendC::DataCopyPadExtParams<float>(true, 0, kSlot - 1, 0.0f));
        in_.EnQue(in);
        in = in_.DeQue<float>();
        AscendC::Muls(d_, in, scores_.tiling_.scale, int32_t(slots * kSlot));
        in_.FreeTensor(in);
    }

    // d = (d - sum(d * chosen / total)) / total, total the sum of the chosen scores
    __aicore__ inline void ThroughRenormalisation(int64_t token) const {
        const uint32_t slots = scores_.Slots();
        scores_.VectorToScalar();
        for (uint32_t slot = 0; slot < slots; ++slot) chosen_.SetValue(slot * kSlot, scores_.scores_.GetValue(Expert(token, slot)));
        scores_.ScalarToVector();
        scores_.SumSlots(scores_.total_, chosen_);
        scores_.DivideSlots(chosen_, scores_.total_);
        for (uint32_t slot = 0; slot < slots; ++slot) AscendC::Mul(chosen_[slot * kSlot], d_[slot * kSlot], chosen_[slot * kSlot], 1);
        scores_.SumSlots(dot_, chosen_);
        for (uint32_t slot = 0; slot < slots; ++slot) AscendC::Sub(d_[slot * kSlot], d_[slot * kSlot], dot_, 1);
        AscendC::PipeBarrier<PIPE_V>();
        scores_.DivideSlots(d_, scores_.total_);
    }

    // ds = d where an expert was chosen, else +0
    __aicore__ inline void Scatter(int64_t token) const {
        AscendC::Duplicate(ds_, 0.0f, int32_t(scores_.experts_));
        scores_.VectorToScalar();
        for (uint32_t slot = 0; slot < scores_.Slots(); ++slot) ds_.SetValue(Expert(token, slot), d_.GetValue(slot * kSlot));
        scores_.ScalarToVector();
    }

    // s * (ds - sum(ds * s))
    __aicore__ inline void ThroughSoftmax(const AscendC::LocalTensor<float>& out) const {
        const int32_t count = int32_t(scores_.experts_);
        const SoftmaxSum& sum = scores_.sum_;
        sum.Start();
        sum.Pad(scores_.experts_);
        AscendC::Mul(sum.terms_, ds_, scores_.scores_, count);
        AscendC::PipeBarrier<PIPE_V>();
        sum.Add(scores_.experts_);
        AscendC::Adds(ds_, ds_, -sum.Scalar(sum.one_), count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mul(out, scores_.scores_, ds_, count);
    }

    // ds * (s * (1 - s))
    __aicore__ inline void ThroughSigmoid(const AscendC::LocalTensor<float>& out) const {
        const int32_t count = int32_t(scores_.experts_);
        AscendC::Muls(scores_.work_, scores_.scores_, -1.0f, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(scores_.work_, scores_.work_, 1.0f, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mul(scores_.work_, scores_.scores_, scores_.work_, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mul(out, ds_, scores_.work_, count);
        AscendC::PipeBarrier<PIPE_V>();  // the next row's scores begin with work
    }
};

}  // namespace megatron_ext
