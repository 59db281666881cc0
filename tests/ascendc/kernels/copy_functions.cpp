// Copies with gaps and padding: 1024 16-bit elements of UB, zero at first, between two buffers of global memory.
#include "kernel_operator.h"
#include "runtime.h"

using namespace AscendC;

constexpr uint32_t kElements = 1024;

struct CopyParams {
    int64_t count, length, src_gap, dst_gap, is_pad, left, right;
};

template <typename Body>
inline void with_buffer(GM_ADDR src, GM_ADDR dst, Body body) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, kElements * sizeof(int16_t));
    LocalTensor<int16_t> local = buffer.Get<int16_t>();
    Duplicate(local, int16_t(0), kElements);
    const TEventID id = pipe.FetchEventID(HardEvent::V_MTE2);
    SetFlag<HardEvent::V_MTE2>(id);
    WaitFlag<HardEvent::V_MTE2>(id);
    GlobalTensor<int16_t> from, to;
    from.SetGlobalBuffer((__gm__ int16_t*)src, kElements);
    to.SetGlobalBuffer((__gm__ int16_t*)dst, kElements);
    body(local, from, to);
}

#define COPY_CASE(NAME, LOAD, STORE)                                                                                              \
    extern "C" __attribute__((visibility("default"))) const char* NAME(GM_ADDR src, GM_ADDR dst, const CopyParams* c) {           \
        return ascendc_host::launch({#NAME, 1}, [=] {                                                                             \
            with_buffer(src, dst, [c](LocalTensor<int16_t>& local, GlobalTensor<int16_t>& from, GlobalTensor<int16_t>& to) {      \
                LOAD;                                                                                                             \
                PipeBarrier<PIPE_ALL>();                                                                                          \
                STORE;                                                                                                            \
            });                                                                                                                   \
        });                                                                                                                       \
    }

#define BLOCKS DataCopyParams(uint16_t(c->count), uint16_t(c->length), uint16_t(c->src_gap), uint16_t(c->dst_gap))
#define BYTES DataCopyExtParams(uint16_t(c->count), uint32_t(c->length), uint32_t(c->src_gap), uint32_t(c->dst_gap), 0)
#define PADDING DataCopyPadExtParams<int16_t>(c->is_pad != 0, uint8_t(c->left), uint8_t(c->right), int16_t(-5))

COPY_CASE(load_blocks, DataCopy(local, from, BLOCKS), DataCopy(to, local, kElements))
COPY_CASE(store_blocks, DataCopy(local, from, kElements), DataCopy(to, local, BLOCKS))
COPY_CASE(load_pad, DataCopyPad(local, from, BYTES, PADDING), DataCopy(to, local, kElements))
COPY_CASE(store_pad, DataCopy(local, from, kElements), DataCopyPad(to, local, BYTES))
COPY_CASE(scalar_global, (void)c; (void)local, to.SetValue(3, int16_t(from[10].GetValue(5) + 1)))
