// Rounds around all vector cores: y[r][c] = y[r - 1][c + 1] + 1, and y[0][c] = x[c] + 1. A core that does not wait for its neighbour shows.
#pragma once
#include "kernel_operator.h"
#include "probe_tiling.h"

namespace megatron_ext {

class ProbeSync {
 public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR y, const ProbeSyncTiling& tiling, AscendC::TPipe* pipe) {
        rounds_ = tiling.rounds;
        cores_ = AscendC::GetBlockNum();
        x_.SetGlobalBuffer((__gm__ float*)x, uint64_t(cores_ * kProbeRow));
        y_.SetGlobalBuffer((__gm__ float*)y, uint64_t(rounds_ * cores_ * kProbeRow));
        pipe->InitBuffer(buffer_, uint32_t(kProbeRow * sizeof(float)));
    }

    __aicore__ inline void Process() {
        const int64_t core = AscendC::GetBlockIdx(), next = (core + 1) % cores_;
        AscendC::LocalTensor<float> row = buffer_.Get<float>();
        for (int64_t r = 0; r < rounds_; ++r) {
            if (r > 0)
                AscendC::SyncAll<true>();
            CopyIn(row, r == 0 ? x_[uint64_t(core * kProbeRow)] : y_[uint64_t(((r - 1) * cores_ + next) * kProbeRow)]);
            AscendC::SetFlag<AscendC::HardEvent::MTE2_V>(0);
            AscendC::WaitFlag<AscendC::HardEvent::MTE2_V>(0);
            AscendC::Adds(row, row, 1.0f, int32_t(kProbeRow));
            AscendC::SetFlag<AscendC::HardEvent::V_MTE3>(0);
            AscendC::WaitFlag<AscendC::HardEvent::V_MTE3>(0);
            AscendC::DataCopy(y_[uint64_t((r * cores_ + core) * kProbeRow)], row, uint32_t(kProbeRow));
        }
    }

 private:
    int64_t rounds_, cores_;
    AscendC::GlobalTensor<float> x_, y_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;

    static __aicore__ inline void CopyIn(const AscendC::LocalTensor<float>& row, const AscendC::GlobalTensor<float>& from) {
        AscendC::DataCopy(row, from, uint32_t(kProbeRow));
    }
};

}  // namespace megatron_ext
