// Scores, choice and weights of a token's experts, in the order and with the roundings of megatron_ext/reference/router.py. Legend: E experts, k slots.
//
// A row at a time. Slots lie a DataBlock apart, so that one can be the operand of a vector instruction.
#pragma once
#include "../masked_softmax/masked_softmax_kernel.h"
#include "router_tiling.h"

namespace megatron_ext {

constexpr uint32_t kSlot = 8;              // fp32 elements from slot to slot
constexpr float kLowest = -3.40282347e38f;  // of the numbers that can still be chosen

// Scores of a row of logits, which both kernels need.
class RouterScores {
 public:
    __aicore__ inline void Init(GM_ADDR logits, const RouterTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        experts_ = uint32_t(tiling.experts);
        room_ = (experts_ + kSoftmaxRepeat - 1) / kSoftmaxRepeat * kSoftmaxRepeat;
        logits_.SetGlobalBuffer((__gm__ float*)logits, uint64_t(tiling.tokens * tiling.experts));
        sum_.Init(pipe);
        pipe->InitBuffer(in_, 2, room_ * sizeof(float));
        pipe->InitBuffer(scores_buffer_, room_ * sizeof(float));
        pipe->InitBuffer(work_buffer_, room_ * sizeof(float));
        pipe->InitBuffer(total_buffer_, kSlot * sizeof(float));
        scores_ = scores_buffer_.Get<float>();
        work_ = work_buffer_.Get<float>();
        total_ = total_buffer_.Get<float>();
    }

    __aicore__ inline void Compute(int64_t token) {
        AscendC::LocalTensor<float> x = in_.AllocTensor<float>();
        AscendC::DataCopyPad(x, logits_[uint64_t(token) * experts_], Row(), AscendC::DataCopyPadExtParams<float>());
        in_.EnQue(x);
        x = in_.DeQue<float>();
        if (tiling_.sigmoid)
            Sigmoid(x);
        else
            Softmax(x);
        in_.FreeTensor(x);
    }

    // total = x[0] + x[1] + ..., slot after slot from +0
    __aicore__ inline void SumSlots(const AscendC::LocalTensor<float>& total, const AscendC::LocalTensor<float>& x) const {
        AscendC::Duplicate(total, 0.0f, 1);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t slot = 0; slot < Slots(); ++slot) {
            AscendC::Add(total, total, x[slot * kSlot], 1);
            AscendC::PipeBarrier<PIPE_V>();
        }
    }

    // x = x / by, slot by slot
    __aicore__ inline void DivideSlots(const AscendC::LocalTensor<float>& x, const AscendC::LocalTensor<float>& by) const {
        for (uint32_t slot = 0; slot < Slots(); ++slot) AscendC::Div(x[slot * kSlot], x[slot * kSlot], by, 1);
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline AscendC::DataCopyExtParams Row() const { return AscendC::DataCopyExtParams(1, uint32_t(experts_ * sizeof(float)), 0, 0, 0); }
    __aicore__ inline uint32_t Slots() const { return uint32_t(tiling_.top_k); }
    __aicore__ inline void VectorToScalar() const {
        AscendC::SetFlag<AscendC::HardEvent::V_S>(0);
        AscendC::WaitFlag<AscendC::HardEvent::V_S>(0);
    }
    __aicore__ inline void ScalarToVector() const {
        AscendC::SetFlag<AscendC::HardEvent::S_V>(0);
        AscendC::WaitFlag<AscendC::HardEvent::S_V>(0);
    }

    RouterTiling tiling_;
    uint32_t experts_, room_;  // E, and E rounded up to whole repeats
    SoftmaxSum sum_;
    AscendC::LocalTensor<float> scores_, work_, total_;

 private:
    AscendC::GlobalTensor<float> logits_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> scores_buffer_, work_buffer_, total_buffer_;

    // exp(x - max) / sum
    __aicore__ inline void Softmax(const AscendC::LocalTensor<float>& x) {
        const int32_t count = int32_t(experts_);
        AscendC::ReduceMax(sum_.one_, x, sum_.scratch_, count);
        AscendC::Adds(work_, x, -sum_.Scalar(sum_.one_), count);
        sum_.Start();
        sum_.Pad(experts_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Exp(sum_.terms_, work_, count);
        AscendC::PipeBarrier<PIPE_V>();
        sum_.Add(experts_);
        AscendC::Duplicate(work_, sum_.Scalar(sum_.one_), count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Div(scores_, sum_.terms_, work_, count);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // 1 / (exp(-x) + 1)
    __aicore__ inline void Sigmoid(const AscendC::LocalTensor<float>& x) {
        const int32_t count = int32_t(experts_);
        AscendC::Muls(work_, x, -1.0f, count);
        AscendC::Duplicate(scores_, 1.0f, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Exp(work_, work_, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(work_, work_, 1.0f, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Div(scores_, scores_, work_, count);
        AscendC::PipeBarrier<PIPE_V>();
    }
};

class Router {
 public:
    __aicore__ inline void Init(GM_ADDR logits, GM_ADDR bias, GM_ADDR weights, GM_ADDR ids, const RouterTiling& tiling, AscendC::TPipe* pipe) {
        scores_.Init(logits, tiling, pipe);
        weights_.SetGlobalBuffer((__gm__ float*)weights, uint64_t(tiling.tokens * tiling.top_k));
        ids_.SetGlobalBuffer((__gm__ int32_t*)ids, uint64_t(2 * tiling.tokens * tiling.top_k));  // int64: a word for the expert, and a zero
        pipe->InitBuffer(out_, 2, OutElements() * sizeof(float));
        pipe->InitBuffer(choice_buffer_, scores_.room_ * sizeof(float));
        pipe->InitBuffer(best_buffer_, kSlot * sizeof(float));
        pipe->InitBuffer(keep_buffer_, (scores_.room_ / 8 + 31) / 32 * 32);
        choice_ = choice_buffer_.Get<float>();
        best_ = best_buffer_.Get<float>();
        keep_ = keep_buffer_.Get<uint8_t>();
        AscendC::Duplicate(choice_, 0.0f, int32_t(scores_.room_));  // Compare reads whole repeats
        if (tiling.biased) LoadBias(bias, pipe);
        if (tiling.groups > 0) InitGroups(pipe);
    }

    __aicore__ inline void Process() {
        const RouterTiling& t = scores_.tiling_;
        for (int64_t token = AscendC::GetBlockIdx(); token < t.tokens; token += AscendC::GetBlockNum()) {
            scores_.Compute(token);
            Choice();
            if (t.groups > 0) KeepGroups();
            AscendC::LocalTensor<float> out = out_.AllocTensor<float>();
            Choose(out);
            Weigh(out);
            out_.EnQue(out);
            Store(token);
        }
    }

 private:
    static constexpr float kInfinity = __builtin_inff();

    RouterScores scores_;
    AscendC::GlobalTensor<float> weights_;
    AscendC::GlobalTensor<int32_t> ids_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;  // [slots of weights | ids]
    AscendC::TQue<AscendC::TPosition::VECIN, 1> in_bias_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> choice_buffer_, best_buffer_, keep_buffer_, bias_buffer_, number_buffer_, kept_buffer_, group_buffer_;
    AscendC::LocalTensor<float> choice_, best_, bias_, number_, kept_, group_;
    AscendC::LocalTensor<uint8_t> keep_;

    __aicore__ inline uint32_t OutElements() const { return scores_.Slots() * kSlot + (2 * scores_.Slots() + kSlot - 1) / kSlot * kSlot; }

    __aicore__ inline void LoadBias(GM_ADDR bias, AscendC::TPipe* pipe) {
        AscendC::GlobalTensor<float> source;
        source.SetGlobalBuffer((__gm__ float*)bias, scores_.experts_);
        pipe->InitBuffer(in_bias_, 1, scores_.room_ * sizeof(float));
        pipe->InitBuffer(bias_buffer_, scores_.room_ * sizeof(float));
        bias_ = bias_buffer_.Get<float>();
        AscendC::LocalTensor<float> in = in_bias_.AllocTensor<float>();
        AscendC::DataCopyPad(in, source, scores_.Row(), AscendC::DataCopyPadExtParams<float>());
        in_bias_.EnQue(in);
        in = in_bias_.DeQue<float>();
        AscendC::Adds(bias_, in, -0.0f, int32_t(scores_.experts_));  // a copy that keeps the sign of zero
        in_bias_.FreeTensor(in);
    }

    // number = 0, 1, ..., E - 1
    __aicore__ inline void InitGroups(AscendC::TPipe* pipe) {
        pipe->InitBuffer(number_buffer_, scores_.room_ * sizeof(float));
        pipe->InitBuffer(kept_buffer_, scores_.room_ * sizeof(float));
        pipe->InitBuffer(group_buffer_, uint32_t(scores_.tiling_.groups + kSlot - 1) / kSlot * kSlot * sizeof(float));
        number_ = number_buffer_.Get<float>();
        kept_ = kept_buffer_.Get<float>();
        group_ = group_buffer_.Get<float>();
        AscendC::Duplicate(number_, 0.0f, int32_t(scores_.room_));
        scores_.VectorToScalar();
        for (uint32_t i = 0; i < scores_.experts_; ++i) number_.SetValue(i, float(i));
        scores_.ScalarToVector();
    }

    // What experts are chosen by. NaN counts as +inf; -inf becomes a number, as -inf marks what is chosen already.
    __aicore__ inline void Choice() const {
        const int32_t count = int32_t(scores_.experts_);
        if (scores_.tiling_.biased)
            AscendC::Add(choice_, scores_.scores_, bias_, count);
        else
            AscendC::Adds(choice_, scores_.scores_, -0.0f, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Compare(keep_, choice_, choice_, AscendC::CMPMODE::EQ, scores_.room_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Select(choice_, keep_, choice_, kInfinity, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, uint32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Maxs(choice_, choice_, kLowest, count);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // The largest of values, ties by lower index, as ReduceMax documents; taken out of them.
    __aicore__ inline uint32_t TakeBest(const AscendC::LocalTensor<float>& values, uint32_t count) const {
        AscendC::ReduceMax(best_, values, scores_.sum_.scratch_, int32_t(count), true);
        scores_.VectorToScalar();
        const uint32_t index = best_.ReinterpretCast<uint32_t>().GetValue(1);
        values.SetValue(index, -kInfinity);
        return index;
    }

    // x in group g, `elsewhere` in the others
    __aicore__ inline void OfGroup(const AscendC::LocalTensor<float>& x, int64_t g, const AscendC::LocalTensor<float>& elsewhere) const {
        const uint32_t count = scores_.experts_;
        const float size = float(count / scores_.tiling_.groups), first = float(g) * size;
        AscendC::Compares(keep_, number_, first, AscendC::CMPMODE::GE, scores_.room_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Select(scores_.work_, keep_, x, elsewhere, AscendC::SELMODE::VSEL_TENSOR_TENSOR_MODE, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Compares(keep_, number_, first + size, AscendC::CMPMODE::LT, scores_.room_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Select(scores_.work_, keep_, scores_.work_, elsewhere, AscendC::SELMODE::VSEL_TENSOR_TENSOR_MODE, count);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // choice = kLowest outside the groups with the largest sums of their best values
    __aicore__ inline void KeepGroups() const {
        const RouterTiling& t = scores_.tiling_;
        AscendC::Duplicate(kept_, kLowest, int32_t(scores_.experts_));
        for (int64_t g = 0; g < t.groups; ++g) ScoreGroup(g);
        AscendC::Maxs(group_, group_, kLowest, int32_t(t.groups));
        AscendC::PipeBarrier<PIPE_V>();
        for (int64_t i = 0; i < t.kept_groups; ++i) {
            const uint32_t g = TakeBest(group_, uint32_t(t.groups));
            scores_.ScalarToVector();
            OfGroup(choice_, g, kept_);
            AscendC::Adds(kept_, scores_.work_, -0.0f, int32_t(scores_.experts_));
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::Adds(choice_, kept_, -0.0f, int32_t(scores_.experts_));
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void ScoreGroup(int64_t g) const {
        OfGroup(choice_, g, kept_);
        AscendC::Duplicate(scores_.total_, 0.0f, 1);
        for (int64_t i = 0; i < scores_.tiling_.best_of_group; ++i) {
            TakeBest(scores_.work_, scores_.experts_);
            scores_.ScalarToVector();
            AscendC::Add(scores_.total_, scores_.total_, best_, 1);
            AscendC::PipeBarrier<PIPE_V>();
        }
        scores_.VectorToScalar();
        group_.SetValue(uint32_t(g), scores_.total_.GetValue(0));
        scores_.ScalarToVector();
    }

    __aicore__ inline void Choose(const AscendC::LocalTensor<float>& out) const {
        const uint32_t slots = scores_.Slots();
        const AscendC::LocalTensor<int32_t> ids = out[slots * kSlot].ReinterpretCast<int32_t>();
        AscendC::Duplicate(out, 0.0f, int32_t(OutElements()));
        for (uint32_t slot = 0; slot < slots; ++slot) {
            const uint32_t expert = TakeBest(choice_, scores_.experts_);
            out.SetValue(slot * kSlot, scores_.scores_.GetValue(expert));
            ids.SetValue(2 * slot, int32_t(expert));
            scores_.ScalarToVector();
        }
    }

    __aicore__ inline void Weigh(const AscendC::LocalTensor<float>& out) const {
        if (scores_.tiling_.renormalize) {
            scores_.SumSlots(scores_.total_, out);
            scores_.DivideSlots(out, scores_.total_);
        }
        AscendC::Muls(out, out, scores_.tiling_.scale, int32_t(scores_.Slots() * kSlot));
    }

    __aicore__ inline void Store(int64_t token) {
        const uint32_t slots = scores_.Slots();
        AscendC::LocalTensor<float> out = out_.DeQue<float>();
        AscendC::DataCopyPad(weights_[uint64_t(token) * slots], out, AscendC::DataCopyExtParams(uint16_t(slots), sizeof(float), 0, 0, 0));
        AscendC::DataCopyPad(ids_[uint64_t(token) * 2 * slots], out[slots * kSlot].ReinterpretCast<int32_t>(),
                             AscendC::DataCopyExtParams(1, uint32_t(2 * slots * sizeof(int32_t)), 0, 0, 0));
        out_.FreeTensor(out);
    }
};

}  // namespace megatron_ext
