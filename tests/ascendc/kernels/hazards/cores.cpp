// Two products per block on the cube core, 32 x 16 = (32 x 32) x (32 x 16) each, through one workspace to the vector cores, which add 1.
// Then every vector core adds up what its neighbour in the next block wrote.
#include "kernel_operator.h"

using namespace AscendC;

constexpr int32_t kRounds = 2, kM = 32, kN = 16, kK = 32, kC = kM * kN;

struct Memories {
    GlobalTensor<half> a, b;
    GlobalTensor<float> workspace, out, sums;
};

__aicore__ void cube(TPipe& pipe, const Memories& gm) {
    TBuf<TPosition::A1> a1_buffer;
    TBuf<TPosition::B1> b1_buffer;
    TBuf<TPosition::A2> a2_buffer;
    TBuf<TPosition::B2> b2_buffer;
    TBuf<TPosition::CO1> c_buffer;
    pipe.InitBuffer(a1_buffer, kM * kK * sizeof(half));
    pipe.InitBuffer(b1_buffer, kN * kK * sizeof(half));
    pipe.InitBuffer(a2_buffer, kM * kK * sizeof(half));
    pipe.InitBuffer(b2_buffer, kN * kK * sizeof(half));
    pipe.InitBuffer(c_buffer, kC * sizeof(float));
    LocalTensor<half> a1 = a1_buffer.Get<half>(), b1 = b1_buffer.Get<half>(), a2 = a2_buffer.Get<half>(), b2 = b2_buffer.Get<half>();
    LocalTensor<float> c = c_buffer.Get<float>();
    SetFlag<HardEvent::MTE1_MTE2>(0);
    SetFlag<HardEvent::M_MTE1>(0);
    SetFlag<HardEvent::FIX_M>(0);
    for (int32_t round = 0; round < kRounds; ++round) {
        WaitFlag<HardEvent::MTE1_MTE2>(0);
        DataCopy(a1, gm.a[round * kM * kK], Nd2NzParams(1, kM, kK, 0, kK, kM, 1, 0));
        DataCopy(b1, gm.b, Nd2NzParams(1, kN, kK, 0, kK, kN, 1, 0));
        SetFlag<HardEvent::MTE2_MTE1>(0);
        WaitFlag<HardEvent::MTE2_MTE1>(0);
        WaitFlag<HardEvent::M_MTE1>(0);
        LoadData(a2, a1, LoadData2DParams(0, 4, 1, 0, 0, false, 0));
        LoadData(b2, b1, LoadData2DParams(0, 2, 1, 0, 0, false, 0));
        SetFlag<HardEvent::MTE1_MTE2>(0);
        SetFlag<HardEvent::MTE1_M>(0);
        WaitFlag<HardEvent::MTE1_M>(0);
        WaitFlag<HardEvent::FIX_M>(0);
        Mmad(c, a2, b2, MmadParams(kM, kN, kK / 2, 0, false, true));
        PipeBarrier<PIPE_M>();
        Mmad(c, a2[kM * kK / 2], b2[kN * kK / 2], MmadParams(kM, kN, kK / 2, 0, false, false));
        SetFlag<HardEvent::M_MTE1>(0);
        SetFlag<HardEvent::M_FIX>(0);
        WaitFlag<HardEvent::M_FIX>(0);
        if (round > 0) CrossCoreWaitFlag(1);
        Fixpipe(gm.workspace[GetBlockIdx() * kC], c, FixpipeParamsV220(kN, kM, kM, kN, false));
        SetFlag<HardEvent::FIX_M>(0);
        CrossCoreSetFlag<2, PIPE_FIX>(0);
    }
    WaitFlag<HardEvent::MTE1_MTE2>(0);
    WaitFlag<HardEvent::M_MTE1>(0);
    WaitFlag<HardEvent::FIX_M>(0);
}

__aicore__ void vector(TPipe& pipe, const Memories& gm) {
    constexpr int32_t kPart = kC / 2;
    TQue<TPosition::VECIN, 1> in;
    TQue<TPosition::VECOUT, 1> out;
    pipe.InitBuffer(in, 1, kPart * sizeof(float));
    pipe.InitBuffer(out, 1, kPart * sizeof(float));
    LocalTensor<float> x, y;
    for (int32_t round = 0; round < kRounds; ++round) {
        x = in.AllocTensor<float>();
        CrossCoreWaitFlag(0);
        DataCopy(x, gm.workspace[GetBlockIdx() * kPart], kPart);
        if (round + 1 < kRounds) CrossCoreSetFlag<2, PIPE_MTE2>(1);
        in.EnQue(x);
        x = in.DeQue<float>();
        y = out.AllocTensor<float>();
        Adds(y, x, 1.0f, kPart);
        in.FreeTensor(x);
        out.EnQue(y);
        y = out.DeQue<float>();
        DataCopy(gm.out[(round * 2 * GetBlockNum() + GetBlockIdx()) * kPart], y, kPart);
        out.FreeTensor(y);
    }
    SyncAll<true>();
    const int64_t neighbour = (GetBlockIdx() + 2) % (2 * GetBlockNum());
    x = in.AllocTensor<float>();
    DataCopy(x, gm.out[neighbour * kPart], kPart);
    in.EnQue(x);
    x = in.DeQue<float>();
    y = out.AllocTensor<float>();
    Adds(y, x, 0.0f, kPart);
    in.FreeTensor(x);
    out.EnQue(y);
    y = out.DeQue<float>();
    DataCopy(gm.sums[GetBlockIdx() * kPart], y, kPart);
    out.FreeTensor(y);
}

__global__ __aicore__ void kernel(GM_ADDR x, GM_ADDR y, GM_ADDR z) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    const int64_t blocks = GetBlockNum();
    Memories gm;
    gm.a.SetGlobalBuffer((__gm__ half*)x, kRounds * kM * kK);
    gm.b.SetGlobalBuffer((__gm__ half*)x + kRounds * kM * kK, kN * kK);
    gm.workspace.SetGlobalBuffer((__gm__ float*)y, blocks * kC);
    gm.out.SetGlobalBuffer((__gm__ float*)z, kRounds * blocks * kC);
    gm.sums.SetGlobalBuffer((__gm__ float*)z + kRounds * blocks * kC, blocks * kC);
    TPipe pipe;
    if (ASCEND_IS_AIC) cube(pipe, gm);
    if (ASCEND_IS_AIV) vector(pipe, gm);
}
