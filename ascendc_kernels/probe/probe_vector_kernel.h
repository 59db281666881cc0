// One instruction of the vector core. Every block does the same and stores a copy of its own.
#pragma once
#include "kernel_operator.h"
#include "probe_tiling.h"

namespace megatron_ext {

class ProbeVector {
 public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR y, GM_ADDR out, const ProbeVectorTiling& tiling, AscendC::TPipe* pipe) {
        t_ = tiling;
        const uint32_t bytes = uint32_t(tiling.size * sizeof(float));
        x_.SetGlobalBuffer((__gm__ float*)x, uint64_t(tiling.size));
        y_.SetGlobalBuffer((__gm__ float*)y, uint64_t(tiling.size));
        out_.SetGlobalBuffer((__gm__ float*)out, uint64_t(AscendC::GetBlockNum() * tiling.results));
        pipe->InitBuffer(in_queue_, 2, bytes);
        pipe->InitBuffer(out_queue_, 1, bytes);
        pipe->InitBuffer(scratch_, bytes);
    }

    __aicore__ inline void Process() {
        CopyIn(x_);
        CopyIn(y_);
        AscendC::LocalTensor<float> x = in_queue_.DeQue<float>();
        AscendC::LocalTensor<float> y = in_queue_.DeQue<float>();
        AscendC::LocalTensor<float> out = out_queue_.AllocTensor<float>();
        Compute(out, x, y);
        out_queue_.EnQue(out);
        in_queue_.FreeTensor(x);
        in_queue_.FreeTensor(y);
        CopyOut();
    }

 private:
    ProbeVectorTiling t_;
    AscendC::GlobalTensor<float> x_, y_, out_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_queue_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> out_queue_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> scratch_;

    __aicore__ inline void CopyIn(const AscendC::GlobalTensor<float>& from) {
        AscendC::LocalTensor<float> to = in_queue_.AllocTensor<float>();
        AscendC::DataCopy(to, from, uint32_t(t_.size));
        in_queue_.EnQue(to);
    }

    __aicore__ inline void Compute(const AscendC::LocalTensor<float>& out, const AscendC::LocalTensor<float>& x,
                                   const AscendC::LocalTensor<float>& y) {
        const int32_t count = int32_t(t_.count);
        switch (t_.operation) {
            case kProbeExp: AscendC::Exp(out, x, count); break;
            case kProbeLn: AscendC::Ln(out, x, count); break;
            case kProbeSqrt: AscendC::Sqrt(out, x, count); break;
            case kProbeAdd: AscendC::Add(out, x, y, count); break;
            case kProbeMul: AscendC::Mul(out, x, y, count); break;
            case kProbeDiv: AscendC::Div(out, x, y, count); break;
            case kProbeMax: AscendC::Max(out, x, y, count); break;
            case kProbeKeep: AscendC::Adds(out, x, -0.0f, count); break;
            case kProbeRoundBf16: Round(scratch_.Get<bfloat16_t>(), out, x); break;
            case kProbeRoundF16: Round(scratch_.Get<half>(), out, x); break;
            case kProbeSum: AscendC::ReduceSum<float>(out, x, scratch_.Get<float>(), count); break;
            default:
                AscendC::ReduceRepeat<AscendC::ReduceType::SUM>(out, x, count, int32_t(t_.size / kProbeRepeat), 1, 1, int32_t(kProbeRepeat / 8));
        }
    }

    template <typename T>
    __aicore__ inline void Round(const AscendC::LocalTensor<T>& rounded, const AscendC::LocalTensor<float>& out,
                                 const AscendC::LocalTensor<float>& x) {
        AscendC::Cast(rounded, x, AscendC::RoundMode::CAST_RINT, uint32_t(t_.count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(out, rounded, AscendC::RoundMode::CAST_NONE, uint32_t(t_.count));
    }

    __aicore__ inline void CopyOut() {
        AscendC::LocalTensor<float> out = out_queue_.DeQue<float>();
        AscendC::DataCopyPad(out_[uint64_t(AscendC::GetBlockIdx() * t_.results)], out,
                             AscendC::DataCopyExtParams(1, uint32_t(t_.results * sizeof(float)), 0, 0, 0));
        out_queue_.FreeTensor(out);
    }
};

}  // namespace megatron_ext
