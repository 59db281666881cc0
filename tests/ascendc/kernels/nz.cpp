// What DataCopy to NZ leaves in L1, read back through a product with the identity: a 32 x 16 matrix of halves from L1 at fractal p[8].
#include "kernel_operator.h"
#include "runtime.h"

using namespace AscendC;

__global__ __aicore__ void read_back(GM_ADDR src, GM_ADDR identity, GM_ADDR dst, const int64_t* p) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
    TPipe pipe;
    TBuf<TPosition::A1> a1_buffer, b1_buffer;
    TBuf<TPosition::A2> a2_buffer;
    TBuf<TPosition::B2> b2_buffer;
    TBuf<TPosition::CO1> c_buffer;
    pipe.InitBuffer(a1_buffer, 64 * 512);
    pipe.InitBuffer(b1_buffer, 512);
    pipe.InitBuffer(a2_buffer, 2 * 512);
    pipe.InitBuffer(b2_buffer, 512);
    pipe.InitBuffer(c_buffer, 2 * 1024);
    LocalTensor<half> a1 = a1_buffer.Get<half>(), b1 = b1_buffer.Get<half>(), a2 = a2_buffer.Get<half>(), b2 = b2_buffer.Get<half>();
    LocalTensor<float> c = c_buffer.Get<float>();
    GlobalTensor<half> from, unit;
    GlobalTensor<float> to;
    from.SetGlobalBuffer((__gm__ half*)src);
    unit.SetGlobalBuffer((__gm__ half*)identity, 256);
    to.SetGlobalBuffer((__gm__ float*)dst, 512);
    DataCopy(a1, from, Nd2NzParams(uint16_t(p[0]), uint16_t(p[1]), uint16_t(p[2]), uint16_t(p[3]), uint16_t(p[4]), uint16_t(p[5]), uint16_t(p[6]),
                                   uint16_t(p[7])));
    DataCopy(b1, unit, 256);
    PipeBarrier<PIPE_ALL>();
    LoadData(a2, a1, LoadData2DParams(uint16_t(p[8]), 2, 1, 0, 0, false, 0));
    LoadData(b2, b1, LoadData2DParams(0, 1, 1, 0, 0, false, 0));
    PipeBarrier<PIPE_ALL>();
    Mmad(c, a2, b2, MmadParams(32, 16, 16, 0, false, true));
    PipeBarrier<PIPE_ALL>();
    Fixpipe(to, c, FixpipeParamsV220(16, 32, 32, 16, false));
}

extern "C" __attribute__((visibility("default"))) const char* run_read_back(GM_ADDR src, GM_ADDR identity, GM_ADDR dst, const int64_t* p) {
    return ascendc_host::launch({"read_back", 1}, [=] { read_back(src, identity, dst, p); });
}
