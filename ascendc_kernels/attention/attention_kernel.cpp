// Entry points of attention: operands q, k, v, block_tables (paged), cu_query_lens, kv_lens (paged), zeros [128, D], out, lse, workspace.
#include "attention_kernel.h"

#include "launch.h"

namespace megatron_ext {

template <typename T>
__global__ __aicore__ void attention(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR block_tables, GM_ADDR cu_query_lens, GM_ADDR kv_lens, GM_ADDR zeros,
                                     GM_ADDR out, GM_ADDR lse, GM_ADDR workspace, const AttentionTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    AscendC::TPipe pipe;
    AttentionSequences sequences;
    sequences.Init(cu_query_lens, kv_lens, tiling);
    AttentionWorkspace<T> slots;
    slots.Init(workspace, tiling);
    if (ASCEND_IS_AIC) {
        AttentionCube<T> cube;
        cube.Init(q, k, v, block_tables, zeros, sequences, slots, tiling, &pipe);
        cube.Process();
    }
    if (ASCEND_IS_AIV) {
        AttentionVector<T> vector;
        vector.Init(out, lse, sequences, slots, tiling, &pipe);
        vector.Process();
    }
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(attention_bf16, 10, megatron_ext::AttentionTiling, megatron_ext::attention<bfloat16_t>)
MEGATRON_EXT_LAUNCH(attention_f16, 10, megatron_ext::AttentionTiling, megatron_ext::attention<half>)
