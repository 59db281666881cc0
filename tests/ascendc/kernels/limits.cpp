// One violation per entry.
#include "kernel_operator.h"
#include "runtime.h"

using namespace AscendC;

#define CASE(NAME, TYPE, ...)                                                                                                             \
    extern "C" __attribute__((visibility("default"))) const char* NAME(GM_ADDR gm, int64_t blocks, int64_t threads) {                     \
        return ascendc_host::launch({#NAME, blocks, int(threads)}, [=] {                                                                  \
            KERNEL_TASK_TYPE_DEFAULT(TYPE);                                                                                               \
            TPipe pipe;                                                                                                                   \
            GlobalTensor<float> global;                                                                                                   \
            global.SetGlobalBuffer((__gm__ float*)gm, 1024);                                                                              \
            (void)global;                                                                                                                 \
            __VA_ARGS__;                                                                                                                  \
        });                                                                                                                               \
    }
#define VECTOR(NAME, ...) CASE(NAME, KERNEL_TYPE_AIV_ONLY, __VA_ARGS__)
#define CUBE(NAME, ...) CASE(NAME, KERNEL_TYPE_AIC_ONLY, __VA_ARGS__)
#define MIX(NAME, ...) CASE(NAME, KERNEL_TYPE_MIX_AIC_1_2, __VA_ARGS__)
#define BUFFER(NAME, POSITION, BYTES) \
    TBuf<TPosition::POSITION> NAME;   \
    pipe.InitBuffer(NAME, BYTES)
#define ZEROED(NAME, COUNT)                             \
    BUFFER(NAME##_buffer, VECCALC, COUNT * 4);          \
    LocalTensor<float> NAME = NAME##_buffer.Get<float>(); \
    Duplicate(NAME, 0.0f, COUNT);                       \
    PipeBarrier<PIPE_ALL>()

// ---- memory
VECTOR(ub_overflow, BUFFER(a, VECIN, 100 * 1024); BUFFER(b, VECOUT, 92 * 1024 + 32))
CUBE(l1_overflow, BUFFER(a, A1, 512 * 1024); BUFFER(b, B1, 32))
CUBE(l0a_overflow, TQue<TPosition::A2, 2> q; pipe.InitBuffer(q, 2, 32 * 1024 + 512))
CUBE(l0b_overflow, BUFFER(a, B2, 64 * 1024 + 1))
CUBE(l0c_overflow, BUFFER(a, CO1, 128 * 1024 + 64))
VECTOR(ub_exactly_full, BUFFER(a, VECIN, 100 * 1024); BUFFER(b, VECOUT, 92 * 1024))
VECTOR(too_many_buffers, TBuf<> b; for (int i = 0; i < 65; ++i) pipe.InitBuffer(b, 32))
VECTOR(out_of_buffer, ZEROED(a, 64); Adds(a, a, 1.0f, 65))
VECTOR(out_of_buffer_by_stride, ZEROED(a, 128); Adds(a, a, 1.0f, uint64_t(64), 2, UnaryRepeatParams(1, 1, 8, 9)))
VECTOR(out_of_global_memory, ZEROED(a, 64); DataCopy(global[1000], a, 64))
VECTOR(never_allocated, LocalTensor<float> a; Adds(a, a, 1.0f, 64))
VECTOR(get_beyond_buffer, BUFFER(a, VECCALC, 256); a.GetWithOffset<float>(64, 32))
VECTOR(fresh_buffer, BUFFER(a, VECCALC, 4096); DataCopy(global, a.Get<float>(), 1024))

// ---- alignment and ranges
VECTOR(misaligned_operand, ZEROED(a, 128); Adds(a[1], a[1], 1.0f, 64))
VECTOR(partial_block_copy, ZEROED(a, 64); DataCopy(global, a, 12))
VECTOR(misaligned_copy, ZEROED(a, 64); DataCopy(global, a[4], 8))
VECTOR(repeat_256, ZEROED(a, 128); int repeats = 256; Adds(a, a, 1.0f, uint64_t(64), repeats, UnaryRepeatParams(1, 1, 0, 0)))
VECTOR(reduce_repeat_256, ZEROED(a, 128); WholeReduceSum(a, a, 64, 256, 0, 1, 0))
VECTOR(mask_65, ZEROED(a, 128); Adds(a, a, 1.0f, uint64_t(65), 1, UnaryRepeatParams()))
VECTOR(mask_bits_too_high, ZEROED(a, 128); uint64_t bits[2] = {1, 1}; Adds(a, a, 1.0f, bits, 1, UnaryRepeatParams()))
VECTOR(cut_tree, ZEROED(a, 128); ZEROED(b, 64); ReduceSum(b, a, b, 65))
VECTOR(odd_compare, ZEROED(a, 128); BUFFER(m, VECCALC, 32); LocalTensor<uint8_t> bits = m.Get<uint8_t>();
       Compares(bits, a, 0.0f, CMPMODE::LT, 63))
VECTOR(cast_none_to_bf16, ZEROED(a, 64); BUFFER(h, VECCALC, 128); LocalTensor<bfloat16_t> out = h.Get<bfloat16_t>();
       Cast(out, a, RoundMode::CAST_NONE, 64))
VECTOR(in_place_after_a_read, ZEROED(a, 64); ZEROED(b, 64); Adds(b, a, 1.0f, 64); Adds(a, a, 1.0f, 64))
VECTOR(event_id_8, SetFlag<HardEvent::MTE2_V>(8))
CUBE(gemv, BUFFER(a, A2, 512); BUFFER(b, B2, 512); BUFFER(c, CO1, 1024); LocalTensor<half> l = a.Get<half>(); LocalTensor<half> r = b.Get<half>();
     LocalTensor<float> out = c.Get<float>(); Mmad(out, l, r, MmadParams(1, 16, 16, 0, false, true)))
CUBE(mmad_from_l1, BUFFER(a, A1, 512); BUFFER(b, B2, 512); BUFFER(c, CO1, 1024); LocalTensor<half> l = a.Get<half>();
     LocalTensor<half> r = b.Get<half>(); LocalTensor<float> out = c.Get<float>(); Mmad(out, l, r, MmadParams(16, 16, 16, 0, false, true)))
CUBE(mmad_beyond_l0c, BUFFER(a, A2, 1024); BUFFER(b, B2, 512); BUFFER(c, CO1, 1024); LocalTensor<half> l = a.Get<half>();
     LocalTensor<half> r = b.Get<half>(); LocalTensor<float> out = c.Get<float>(); Mmad(out, l, r, MmadParams(32, 16, 16, 0, false, true)))
CUBE(fixpipe_wrong_quant, BUFFER(c, CO1, 1024); GlobalTensor<half> g; g.SetGlobalBuffer((__gm__ half*)gm, 256);
     LocalTensor<float> in = c.Get<float>();
     Fixpipe(g, in, FixpipeParamsV220(16, 16, 16, 16, false)))
CUBE(vector_on_cube, ZEROED(a, 64))
VECTOR(cube_on_vector, BUFFER(a, A1, 512); BUFFER(b, A2, 512); LocalTensor<half> l = a.Get<half>(); LocalTensor<half> r = b.Get<half>();
       LoadData(r, l, LoadData2DParams(0, 1, 1, 0, 0, false, 0)))

// ---- queues
VECTOR(no_free_buffer, TQue<TPosition::VECIN, 1> q; pipe.InitBuffer(q, 1, 256); q.AllocTensor<float>(); q.AllocTensor<float>())
VECTOR(empty_queue, TQue<TPosition::VECIN, 1> q; pipe.InitBuffer(q, 1, 256); q.DeQue<float>())
VECTOR(queue_too_deep, TQue<TPosition::VECIN, 1> q; pipe.InitBuffer(q, 2, 256); LocalTensor<float> a = q.AllocTensor<float>(); q.EnQue(a);
       a = q.AllocTensor<float>(); q.EnQue(a))
VECTOR(foreign_tensor, TQue<TPosition::VECIN, 1> q; pipe.InitBuffer(q, 1, 256); ZEROED(a, 64); q.EnQue(a))
VECTOR(used_after_free, TQue<TPosition::VECOUT, 1> q; pipe.InitBuffer(q, 1, 256); LocalTensor<float> a = q.AllocTensor<float>(); q.FreeTensor(a);
       Duplicate(a, 0.0f, 64))
VECTOR(left_in_queue, TQue<TPosition::VECOUT, 1> q; pipe.InitBuffer(q, 1, 256); LocalTensor<float> a = q.AllocTensor<float>(); q.EnQue(a))
VECTOR(left_flag, SetFlag<HardEvent::V_MTE3>(3))

// ---- between cores
VECTOR(sync_in_plain_vector_kernel, SyncAll())
CASE(hanging_sync_all, KERNEL_TYPE_MIX_AIV_1_0, if (GetBlockIdx() != 1) SyncAll())
MIX(hanging_flag, if (ASCEND_IS_AIC) CrossCoreWaitFlag(3))
MIX(half_set_flag, if (ASCEND_IS_AIC) CrossCoreWaitFlag(5); else if (GetSubBlockIdx() == 0) CrossCoreSetFlag<2, PIPE_MTE3>(5))
MIX(flag_never_waited_for, if (ASCEND_IS_AIC) CrossCoreSetFlag<2, PIPE_FIX>(4))
MIX(flag_16, if (ASCEND_IS_AIC) CrossCoreSetFlag<2, PIPE_FIX>(16))
MIX(flag_counter, if (ASCEND_IS_AIC) for (int i = 0; i < 16; ++i) CrossCoreSetFlag<2, PIPE_FIX>(4))
MIX(vector_only_sync_on_cube, SyncAll<true>())
CASE(mixed_sync_in_vector_kernel, KERNEL_TYPE_MIX_AIV_1_0, SyncAll<false>())

extern "C" __attribute__((visibility("default"))) const char* no_kernel_type(GM_ADDR, int64_t blocks, int64_t threads) {
    return ascendc_host::launch({"no_kernel_type", blocks, int(threads)}, [] { TPipe pipe; });
}
