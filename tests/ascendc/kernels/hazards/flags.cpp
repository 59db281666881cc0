// z = x * y[0] + x, double-buffered by flags, then a row that the vector and the scalar pipe write in turn.
#include "kernel_operator.h"

using namespace AscendC;

__global__ __aicore__ void kernel(GM_ADDR x, GM_ADDR y, GM_ADDR z) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    constexpr int32_t kTile = 128, kTiles = 6, kRow = 64;
    TPipe pipe;
    TBuf<TPosition::VECCALC> in_buffer, out_buffer, row_buffer;
    pipe.InitBuffer(in_buffer, 2 * kTile * sizeof(float));
    pipe.InitBuffer(out_buffer, 2 * kTile * sizeof(float));
    pipe.InitBuffer(row_buffer, kRow * sizeof(float));
    GlobalTensor<float> gx, gy, gz;
    gx.SetGlobalBuffer((__gm__ float*)x, kTiles * kTile);
    gy.SetGlobalBuffer((__gm__ float*)y, kRow);
    gz.SetGlobalBuffer((__gm__ float*)z, kTiles * kTile + kRow);
    LocalTensor<float> row = row_buffer.Get<float>();
    DataCopy(row, gy, kRow);
    SetFlag<HardEvent::MTE2_S>(0);
    WaitFlag<HardEvent::MTE2_S>(0);
    const float scale = row.GetValue(0);
    SetFlag<HardEvent::V_MTE2>(0);
    SetFlag<HardEvent::V_MTE2>(1);
    SetFlag<HardEvent::MTE3_V>(0);
    SetFlag<HardEvent::MTE3_V>(1);
    for (int32_t t = 0; t < kTiles; ++t) {
        const int32_t turn = t % 2;
        LocalTensor<float> in = in_buffer.GetWithOffset<float>(kTile, turn * kTile * sizeof(float));
        LocalTensor<float> out = out_buffer.GetWithOffset<float>(kTile, turn * kTile * sizeof(float));
        WaitFlag<HardEvent::V_MTE2>(turn);
        DataCopy(in, gx[t * kTile], kTile);
        SetFlag<HardEvent::MTE2_V>(turn);
        WaitFlag<HardEvent::MTE2_V>(turn);
        WaitFlag<HardEvent::MTE3_V>(turn);
        Muls(out, in, scale, kTile);
        PipeBarrier<PIPE_V>();
        Add(out, out, in, kTile);
        SetFlag<HardEvent::V_MTE2>(turn);
        SetFlag<HardEvent::V_MTE3>(turn);
        WaitFlag<HardEvent::V_MTE3>(turn);
        DataCopy(gz[t * kTile], out, kTile);
        SetFlag<HardEvent::MTE3_V>(turn);
    }
    WaitFlag<HardEvent::V_MTE2>(0);
    WaitFlag<HardEvent::V_MTE2>(1);
    WaitFlag<HardEvent::MTE3_V>(0);
    WaitFlag<HardEvent::MTE3_V>(1);
    SetFlag<HardEvent::S_V>(0);
    WaitFlag<HardEvent::S_V>(0);
    Duplicate(row, 3.0f, kRow);
    SetFlag<HardEvent::V_S>(0);
    WaitFlag<HardEvent::V_S>(0);
    row.SetValue(1, scale);
    SetFlag<HardEvent::S_MTE3>(0);
    WaitFlag<HardEvent::S_MTE3>(0);
    DataCopy(gz[kTiles * kTile], row, kRow);
}
