// exp and log of fp32 tensors. On the host model Exp and Ln are the functions of megatron_ext/reference/elementary.py; on a device they are the
// device's own: the bits of both engines agree there (same kernel), but may differ from the reference.
#pragma once
#include "elementary_tiling.h"
#include "kernel_operator.h"

namespace megatron_ext {

enum class ElementwiseFunction { kExp, kLog };

template <ElementwiseFunction kFunction>
class Elementwise {
 public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR y, const ElementwiseTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        x_.SetGlobalBuffer((__gm__ float*)x, uint64_t(tiling.size));
        y_.SetGlobalBuffer((__gm__ float*)y, uint64_t(tiling.size));
        pipe->InitBuffer(in_, 2, uint32_t(tiling.tile * sizeof(float)));
        pipe->InitBuffer(out_, 2, uint32_t(tiling.tile * sizeof(float)));
    }

    __aicore__ inline void Process() {
        for (int64_t first = AscendC::GetBlockIdx() * tiling_.tile; first < tiling_.size; first += AscendC::GetBlockNum() * tiling_.tile) {
            const int64_t left = tiling_.size - first;
            const uint32_t count = uint32_t(left < tiling_.tile ? left : tiling_.tile);
            CopyIn(first, count);
            Compute(count);
            CopyOut(first, count);
        }
    }

 private:
    ElementwiseTiling tiling_;
    AscendC::GlobalTensor<float> x_, y_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> out_;

    static __aicore__ inline AscendC::DataCopyExtParams Row(uint32_t count) {
        return AscendC::DataCopyExtParams(1, uint32_t(count * sizeof(float)), 0, 0, 0);
    }

    __aicore__ inline void CopyIn(int64_t first, uint32_t count) {
        AscendC::LocalTensor<float> x = in_.AllocTensor<float>();
        AscendC::DataCopyPad(x, x_[uint64_t(first)], Row(count), AscendC::DataCopyPadExtParams<float>());
        in_.EnQue(x);
    }

    __aicore__ inline void Compute(uint32_t count) {
        AscendC::LocalTensor<float> x = in_.DeQue<float>();
        AscendC::LocalTensor<float> y = out_.AllocTensor<float>();
        if constexpr (kFunction == ElementwiseFunction::kExp)
            AscendC::Exp(y, x, int32_t(count));
        else
            AscendC::Ln(y, x, int32_t(count));
        out_.EnQue(y);
        in_.FreeTensor(x);
    }

    __aicore__ inline void CopyOut(int64_t first, uint32_t count) {
        AscendC::LocalTensor<float> y = out_.DeQue<float>();
        AscendC::DataCopyPad(y_[uint64_t(first)], y, Row(count));
        out_.FreeTensor(y);
    }
};

}  // namespace megatron_ext
