// y = x + 1, row after row through two slots of local memory, ordered by bare flags: a consumer that does not wait, or a producer that does not
// wait for its slot, leaves the bytes of another row.
#pragma once
#include "kernel_operator.h"
#include "probe_tiling.h"

namespace megatron_ext {

class ProbeFlags {
 public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR y, const ProbeFlagsTiling& tiling, AscendC::TPipe* pipe) {
        rows_ = tiling.rows;
        x_.SetGlobalBuffer((__gm__ float*)x, uint64_t(rows_ * kProbeRow));
        y_.SetGlobalBuffer((__gm__ float*)y, uint64_t(rows_ * kProbeRow));
        pipe->InitBuffer(buffer_, uint32_t(kSlots * kProbeRow * sizeof(float)));
    }

    __aicore__ inline void Process() {
        AscendC::LocalTensor<float> slots = buffer_.Get<float>();
        int64_t taken = 0;
        for (int64_t row = AscendC::GetBlockIdx(); row < rows_; row += AscendC::GetBlockNum(), ++taken) {
            const int32_t slot = int32_t(taken % kSlots);
            AscendC::LocalTensor<float> tile = slots[uint32_t(slot * kProbeRow)];
            if (taken >= kSlots)
                AscendC::WaitFlag<AscendC::HardEvent::MTE3_MTE2>(slot);
            AscendC::DataCopy(tile, x_[uint64_t(row * kProbeRow)], uint32_t(kProbeRow));
            AscendC::SetFlag<AscendC::HardEvent::MTE2_V>(slot);
            AscendC::WaitFlag<AscendC::HardEvent::MTE2_V>(slot);
            AscendC::Adds(tile, tile, 1.0f, int32_t(kProbeRow));
            AscendC::SetFlag<AscendC::HardEvent::V_MTE3>(slot);
            AscendC::WaitFlag<AscendC::HardEvent::V_MTE3>(slot);
            AscendC::DataCopy(y_[uint64_t(row * kProbeRow)], tile, uint32_t(kProbeRow));
            AscendC::SetFlag<AscendC::HardEvent::MTE3_MTE2>(slot);
        }
        for (int64_t i = 0; i < taken && i < kSlots; ++i)
            AscendC::WaitFlag<AscendC::HardEvent::MTE3_MTE2>(int32_t(i));
    }

 private:
    static constexpr int64_t kSlots = 2;

    int64_t rows_;
    AscendC::GlobalTensor<float> x_, y_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;
};

}  // namespace megatron_ext
