// z = (x + y) * x, double-buffered by queues.
#include "kernel_operator.h"

using namespace AscendC;

__global__ __aicore__ void kernel(GM_ADDR x, GM_ADDR y, GM_ADDR z) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    constexpr int32_t kTile = 256, kTiles = 8;
    TPipe pipe;
    TQue<TPosition::VECIN, 2> in_x, in_y;
    TQue<TPosition::VECOUT, 2> out;
    pipe.InitBuffer(in_x, 2, kTile * sizeof(float));
    pipe.InitBuffer(in_y, 2, kTile * sizeof(float));
    pipe.InitBuffer(out, 2, kTile * sizeof(float));
    GlobalTensor<float> gx, gy, gz;
    gx.SetGlobalBuffer((__gm__ float*)x, kTiles * kTile);
    gy.SetGlobalBuffer((__gm__ float*)y, kTiles * kTile);
    gz.SetGlobalBuffer((__gm__ float*)z, kTiles * kTile);
    LocalTensor<float> a, b, c;
    for (int64_t t = GetBlockIdx(); t < kTiles; t += GetBlockNum()) {
        a = in_x.AllocTensor<float>();
        DataCopy(a, gx[t * kTile], kTile);
        in_x.EnQue(a);
        b = in_y.AllocTensor<float>();
        DataCopy(b, gy[t * kTile], kTile);
        in_y.EnQue(b);
        a = in_x.DeQue<float>();
        b = in_y.DeQue<float>();
        c = out.AllocTensor<float>();
        Add(c, a, b, kTile);
        PipeBarrier<PIPE_V>();
        Mul(c, c, a, kTile);
        out.EnQue(c);
        in_x.FreeTensor(a);
        in_y.FreeTensor(b);
        c = out.DeQue<float>();
        DataCopy(gz[t * kTile], c, kTile);
        out.FreeTensor(c);
    }
}
