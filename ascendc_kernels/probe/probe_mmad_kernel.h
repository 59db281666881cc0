// One product on the cube core, in calls of Mmad whose sizes the caller chooses. Every block computes all of it and stores a copy of its own.
#pragma once
#include "cube_product.h"
#include "probe_tiling.h"

namespace megatron_ext {

template <typename T>
class ProbeMmad {
 public:
    __aicore__ inline void Init(GM_ADDR a, GM_ADDR b, GM_ADDR c, const ProbeMmadTiling& tiling, AscendC::TPipe* pipe) {
        t_ = tiling;
        m1_ = InFractals(uint32_t(tiling.m));
        n1_ = InFractals(uint32_t(tiling.n));
        const uint32_t rows = m1_ * kSide, columns = uint32_t(tiling.n), k = uint32_t(tiling.stored_k);
        a_.SetGlobalBuffer((__gm__ T*)a, uint64_t(rows) * k);
        b_.SetGlobalBuffer((__gm__ T*)b, uint64_t(columns) * k);
        c_.SetGlobalBuffer((__gm__ float*)c, uint64_t(AscendC::GetBlockNum() * tiling.m * tiling.n));
        pipe->InitBuffer(a1_, 1, rows * k * sizeof(T));
        pipe->InitBuffer(b1_, 1, columns * k * sizeof(T));
        pipe->InitBuffer(a2_, 1, rows * k * sizeof(T));
        pipe->InitBuffer(b2_, 1, columns * k * sizeof(T));
        pipe->InitBuffer(co1_, 1, rows * columns * sizeof(float));
    }

    __aicore__ inline void Process() {
        CopyIn();
        AscendC::LocalTensor<T> a1 = a1_.template DeQue<T>();
        AscendC::LocalTensor<T> b1 = b1_.template DeQue<T>();
        AscendC::LocalTensor<float> c = co1_.AllocTensor<float>();
        for (int64_t k = 0; k < t_.k; k += t_.call_k) {
            const uint32_t depth = uint32_t(t_.k - k < t_.call_k ? t_.k - k : t_.call_k);
            Split(a1, b1, uint32_t(k) / kSide, InFractals(depth));
            Multiply(c, depth, k == 0);
        }
        a1_.FreeTensor(a1);
        b1_.FreeTensor(b1);
        co1_.EnQue(c);
        CopyOut();
    }

 private:
    ProbeMmadTiling t_;
    uint32_t m1_, n1_;
    AscendC::GlobalTensor<T> a_, b_;
    AscendC::GlobalTensor<float> c_;
    AscendC::TQue<AscendC::TPosition::A1, 1> a1_;
    AscendC::TQue<AscendC::TPosition::B1, 1> b1_;
    AscendC::TQue<AscendC::TPosition::A2, 1> a2_;
    AscendC::TQue<AscendC::TPosition::B2, 1> b2_;
    AscendC::TQue<AscendC::TPosition::CO1, 1> co1_;

    __aicore__ inline void CopyIn() {
        AscendC::LocalTensor<T> a = a1_.template AllocTensor<T>();
        LoadMatrix(a, a_, m1_ * kSide, uint32_t(t_.stored_k), t_.stored_k, false);
        a1_.EnQue(a);
        AscendC::LocalTensor<T> b = b1_.template AllocTensor<T>();
        LoadMatrix(b, b_, uint32_t(t_.n), uint32_t(t_.stored_k), t_.stored_k, false);
        b1_.EnQue(b);
    }

    // Fractals [first, first + k1) of k to L0A, row of fractals after row of fractals, and to L0B, those of a k side by side.
    __aicore__ inline void Split(const AscendC::LocalTensor<T>& a1, const AscendC::LocalTensor<T>& b1, uint32_t first, uint32_t k1) {
        AscendC::LocalTensor<T> a2 = a2_.template AllocTensor<T>();
        for (uint32_t i = 0; i < m1_; ++i)
            AscendC::LoadData(a2[i * k1 * kFractalSize], a1,
                              AscendC::LoadData2DParams(uint16_t(first * m1_ + i), uint8_t(k1), uint16_t(m1_), 0, 0, false, 0));
        a2_.EnQue(a2);
        AscendC::LocalTensor<T> b2 = b2_.template AllocTensor<T>();
        AscendC::LoadData(b2, b1, AscendC::LoadData2DParams(uint16_t(first * n1_), uint8_t(k1 * n1_), 1, 0, 0, false, 0));
        b2_.EnQue(b2);
    }

    // No barrier between calls that add to c: L0A has one slot, so a call waits for a load that has waited for the call before.
    __aicore__ inline void Multiply(const AscendC::LocalTensor<float>& c, uint32_t k, bool starts) {
        AscendC::LocalTensor<T> a2 = a2_.template DeQue<T>();
        AscendC::LocalTensor<T> b2 = b2_.template DeQue<T>();
        AscendC::Mmad(c, a2, b2, AscendC::MmadParams(uint16_t(t_.m), uint16_t(t_.n), uint16_t(k), 0, false, starts));
        a2_.FreeTensor(a2);
        b2_.FreeTensor(b2);
    }

    __aicore__ inline void CopyOut() {
        AscendC::LocalTensor<float> c = co1_.DeQue<float>();
        AscendC::Fixpipe<float, float, AscendC::CFG_ROW_MAJOR>(
            c_[uint64_t(AscendC::GetBlockIdx() * t_.m * t_.n)], c,
            AscendC::FixpipeParamsV220(uint16_t(t_.n), uint16_t(t_.m), uint16_t(m1_ * kSide), uint32_t(t_.n), false));
        co1_.FreeTensor(c);
    }
};

}  // namespace megatron_ext
