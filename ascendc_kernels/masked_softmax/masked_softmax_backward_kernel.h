// dx = (p * (dp - sum(p * dp))) * scale, row by row. Lanes where p is 0 add +0 and are +0, whatever dp holds there.
#pragma once
#include "masked_softmax_kernel.h"

namespace megatron_ext {

template <typename T>
class MaskedSoftmaxBackward {
 public:
    __aicore__ inline void Init(GM_ADDR dp, GM_ADDR p, GM_ADDR dx, const MaskedSoftmaxTiling& tiling, AscendC::TPipe* pipe) {
        tiling_ = tiling;
        dp_.SetGlobalBuffer((__gm__ T*)dp, uint64_t(tiling.rows * tiling.keys));
        p_.SetGlobalBuffer((__gm__ T*)p, uint64_t(tiling.rows * tiling.keys));
        dx_.SetGlobalBuffer((__gm__ T*)dx, uint64_t(tiling.rows * tiling.keys));
        sum_.Init(pipe);
        pipe->InitBuffer(in_, 2, 2 * kSoftmaxTile * sizeof(T));
        pipe->InitBuffer(out_, 1, kSoftmaxTile * sizeof(T));
        pipe->InitBuffer(p_buffer_, kSoftmaxTile * sizeof(float));
        pipe->InitBuffer(dp_buffer_, kSoftmaxTile * sizeof(float));
        pipe->InitBuffer(keep_buffer_, kSoftmaxTile / 8);
        p_wide_ = p_buffer_.template Get<float>();
        dp_wide_ = dp_buffer_.template Get<float>();
        keep_ = keep_buffer_.template Get<uint8_t>();
        AscendC::Duplicate(p_wide_, 0.0f, int32_t(kSoftmaxTile));  // Compares reads whole repeats
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void Process() {
        const bool again = tiling_.keys > kMaskedSoftmaxTile;  // the row does not stay in UB
        for (int64_t row = AscendC::GetBlockIdx(); row < tiling_.rows; row += AscendC::GetBlockNum()) {
            sum_.Start();
            for (int64_t first = 0; first < tiling_.keys; first += kMaskedSoftmaxTile) {
                const uint32_t count = sum_.TileOf(first, tiling_.keys);
                Load(row, first, count);
                sum_.Pad(count);
                AscendC::Mul(sum_.terms_, p_wide_, dp_wide_, int32_t(count));
                AscendC::PipeBarrier<PIPE_V>();
                Keep(sum_.terms_, count);
                sum_.Add(count);
            }
            const float dot = sum_.Scalar(sum_.one_);
            for (int64_t first = 0; first < tiling_.keys; first += kMaskedSoftmaxTile) {
                const uint32_t count = sum_.TileOf(first, tiling_.keys);
                if (again) Load(row, first, count);
                Compute(dot, count);
                Store(row, first, count);
            }
        }
    }

 private:
    MaskedSoftmaxTiling tiling_;
    SoftmaxSum sum_;
    AscendC::GlobalTensor<T> dp_, p_, dx_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> in_;  // [p | dp]
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> p_buffer_, dp_buffer_, keep_buffer_;
    AscendC::LocalTensor<float> p_wide_, dp_wide_;
    AscendC::LocalTensor<uint8_t> keep_;  // a bit for each p that is not 0

    __aicore__ inline void Load(int64_t row, int64_t first, uint32_t count) {
        const AscendC::DataCopyExtParams copy(1, uint32_t(count * sizeof(T)), 0, 0, 0);
        const uint64_t at = uint64_t(row * tiling_.keys + first);
        AscendC::LocalTensor<T> in = in_.template AllocTensor<T>();
        AscendC::DataCopyPad(in, p_[at], copy, AscendC::DataCopyPadExtParams<T>());
        AscendC::DataCopyPad(in[kSoftmaxTile], dp_[at], copy, AscendC::DataCopyPadExtParams<T>());
        in_.EnQue(in);
        in = in_.template DeQue<T>();
        Widen(p_wide_, in, count);
        Widen(dp_wide_, in[kSoftmaxTile], count);
        in_.FreeTensor(in);
        AscendC::Compares(keep_, p_wide_, 0.0f, AscendC::CMPMODE::NE, (count + kSoftmaxRepeat - 1) / kSoftmaxRepeat * kSoftmaxRepeat);
    }

    __aicore__ inline void Keep(const AscendC::LocalTensor<float>& x, uint32_t count) const {
        AscendC::Select(x, keep_, x, 0.0f, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void Compute(float dot, uint32_t count) const {
        AscendC::Adds(dp_wide_, dp_wide_, -dot, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mul(dp_wide_, p_wide_, dp_wide_, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(dp_wide_, dp_wide_, tiling_.scale, int32_t(count));
        AscendC::PipeBarrier<PIPE_V>();
        Keep(dp_wide_, count);
    }

    __aicore__ inline void Store(int64_t row, int64_t first, uint32_t count) {
        AscendC::LocalTensor<T> dx = out_.template AllocTensor<T>();
        Round(dx, dp_wide_, count);
        out_.EnQue(dx);
        dx = out_.template DeQue<T>();
        AscendC::DataCopyPad(dx_[uint64_t(row * tiling_.keys + first)], dx, AscendC::DataCopyExtParams(1, uint32_t(count * sizeof(T)), 0, 0, 0));
        out_.FreeTensor(dx);
    }
};

}  // namespace megatron_ext
