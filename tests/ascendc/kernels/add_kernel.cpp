// A double-buffered vector kernel: z = x + y, one tile of 256 elements per step.
#include "kernel_operator.h"
#include "runtime.h"

using namespace AscendC;

extern "C" __global__ __aicore__ void add_kernel(GM_ADDR x, GM_ADDR y, GM_ADDR z, int64_t tiles) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    constexpr int32_t kTile = 256;
    TPipe pipe;
    TQue<TPosition::VECIN, 2> in_x, in_y;
    TQue<TPosition::VECOUT, 2> out;
    pipe.InitBuffer(in_x, 2, kTile * sizeof(float));
    pipe.InitBuffer(in_y, 2, kTile * sizeof(float));
    pipe.InitBuffer(out, 2, kTile * sizeof(float));
    GlobalTensor<float> gx, gy, gz;
    gx.SetGlobalBuffer((__gm__ float*)x, tiles * kTile);
    gy.SetGlobalBuffer((__gm__ float*)y, tiles * kTile);
    gz.SetGlobalBuffer((__gm__ float*)z, tiles * kTile);
    for (int64_t t = GetBlockIdx(); t < tiles; t += GetBlockNum()) {
        LocalTensor<float> a = in_x.AllocTensor<float>();
        DataCopy(a, gx[t * kTile], kTile);
        in_x.EnQue(a);
        LocalTensor<float> b = in_y.AllocTensor<float>();
        DataCopy(b, gy[t * kTile], kTile);
        in_y.EnQue(b);
        a = in_x.DeQue<float>();
        b = in_y.DeQue<float>();
        LocalTensor<float> c = out.AllocTensor<float>();
        Add(c, a, b, kTile);
        out.EnQue(c);
        in_x.FreeTensor(a);
        in_y.FreeTensor(b);
        c = out.DeQue<float>();
        DataCopy(gz[t * kTile], c, kTile);
        out.FreeTensor(c);
    }
}

extern "C" __attribute__((visibility("default"))) const char* run_add(GM_ADDR x, GM_ADDR y, GM_ADDR z, int64_t tiles, int64_t blocks,
                                                                      int32_t threads) {
    return ascendc_host::launch({"add_kernel", blocks, threads}, [=] { add_kernel(x, y, z, tiles); });
}
