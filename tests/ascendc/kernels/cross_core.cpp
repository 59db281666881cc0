// Exchanges between cores, in each way. Every vector core writes rows to global memory and reads those of another core.
#include "kernel_operator.h"
#include "runtime.h"

using namespace AscendC;

constexpr int32_t kRow = 64;

class Exchange {
 public:
    __aicore__ void Init(GM_ADDR gm, int64_t rows) {
        pipe_.InitBuffer(row_, kRow * sizeof(float));
        gm_.SetGlobalBuffer((__gm__ float*)gm, uint64_t(rows) * kRow);
    }
    __aicore__ void Write(int64_t row, float value) {
        LocalTensor<float> x = row_.Get<float>();
        Duplicate(x, value, kRow);
        SetFlag<HardEvent::V_MTE3>(0);
        WaitFlag<HardEvent::V_MTE3>(0);
        DataCopy(gm_[row * kRow], x, kRow);
    }
    // to = from + 1
    __aicore__ void Forward(int64_t from, int64_t to) {
        LocalTensor<float> x = row_.Get<float>();
        DataCopy(x, gm_[from * kRow], kRow);
        SetFlag<HardEvent::MTE2_V>(0);
        WaitFlag<HardEvent::MTE2_V>(0);
        Adds(x, x, 1.0f, kRow);
        SetFlag<HardEvent::V_MTE3>(0);
        WaitFlag<HardEvent::V_MTE3>(0);
        DataCopy(gm_[to * kRow], x, kRow);
    }
    __aicore__ void Finish() { PipeBarrier<PIPE_ALL>(); }
    __aicore__ void Overrun() { row_.GetWithOffset<float>(kRow, 32); }

 private:
    TPipe pipe_;
    TBuf<TPosition::VECCALC> row_;
    GlobalTensor<float> gm_;
};

#define KERNEL(NAME, TYPE, ROWS, ...)                                                                                 \
    extern "C" __attribute__((visibility("default"))) const char* NAME(GM_ADDR gm, int64_t blocks, int64_t threads) { \
        return ascendc_host::launch({#NAME, blocks, int(threads)}, [=] {                                              \
            KERNEL_TASK_TYPE_DEFAULT(TYPE);                                                                           \
            const int64_t block = GetBlockIdx(), cores = GetBlockNum() * GetTaskRatio();                              \
            (void)block;                                                                                              \
            (void)cores;                                                                                              \
            Exchange exchange;                                                                                        \
            exchange.Init(gm, ROWS);                                                                                  \
            __VA_ARGS__;                                                                                              \
        });                                                                                                           \
    }

// Five rounds around all cores: row [round][core] = row [round - 1][next core] + 1.
KERNEL(sync_all, KERNEL_TYPE_MIX_AIV_1_0, 6 * cores, exchange.Write(block, float(block)); for (int64_t r = 0; r < 5; ++r) {
    SyncAll();
    exchange.Forward(r * cores + (block + 1) % cores, (r + 1) * cores + block);
})

KERNEL(group_flag, KERNEL_TYPE_MIX_AIV_1_0, 6 * cores, exchange.Write(block, float(block)); for (int64_t r = 0; r < 5; ++r) {
    CrossCoreSetFlag<0, PIPE_MTE3>(2);
    CrossCoreWaitFlag(2);
    exchange.Finish();
    exchange.Forward(r * cores + (block + 1) % cores, (r + 1) * cores + block);
})

// The two vector cores of a block.
KERNEL(pair_flag, KERNEL_TYPE_MIX_AIC_1_2, 2 * cores, if (ASCEND_IS_AIV) {
    exchange.Write(block, float(block));
    CrossCoreSetFlag<1, PIPE_MTE3>(7);
    CrossCoreWaitFlag(7);
    exchange.Finish();
    exchange.Forward(block ^ 1, cores + block);
})

// Cube cores take part in the meeting only.
KERNEL(mixed_sync_all, KERNEL_TYPE_MIX_AIC_1_2, 4 * GetBlockNum(), if (ASCEND_IS_AIV) exchange.Write(block, float(block)); SyncAll<false>();
       if (ASCEND_IS_AIV) exchange.Forward((block + 3) % cores, cores + block))

// One core fails; others are left waiting, with flags that nobody will take.
KERNEL(fails_midway, KERNEL_TYPE_MIX_AIC_1_2, cores, if (ASCEND_IS_AIC) {
    CrossCoreSetFlag<2, PIPE_FIX>(7);
    CrossCoreSetFlag<2, PIPE_FIX>(2);
} else {
    exchange.Write(block, -2.0f);
    CrossCoreSetFlag<1, PIPE_MTE3>(7);
    if (block == 3) exchange.Overrun();
} SyncAll<false>())
