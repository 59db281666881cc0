// Entry points of attention_backward: operands d_out, q, k, v, out, lse, cu_seqlens, zeros [128, D], dq, dk, dv (fp32),
// delta (fp32 [T, query heads], scratch), workspace.
#include "attention_backward_kernel.h"

#include "launch.h"

namespace megatron_ext {

template <typename T>
__global__ __aicore__ void attention_backward(GM_ADDR d_out, GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR out, GM_ADDR lse, GM_ADDR cu_seqlens,
                                              GM_ADDR zeros, GM_ADDR dq, GM_ADDR dk, GM_ADDR dv, GM_ADDR delta, GM_ADDR workspace,
                                              const AttentionTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    AscendC::TPipe pipe;
    AttentionSequences sequences;
    sequences.Init(cu_seqlens, nullptr, tiling);
    AttentionBackwardWorkspace<T> slots;
    slots.Init(workspace, tiling);
    if (ASCEND_IS_AIC) {
        AttentionBackwardCube<T> cube;
        cube.Init(d_out, q, k, v, zeros, sequences, slots, tiling, &pipe);
        cube.Process();
    }
    if (ASCEND_IS_AIV) {
        AttentionBackwardVector<T> vector;
        vector.Init(d_out, out, lse, dq, dk, dv, delta, sequences, slots, tiling, &pipe);
        vector.Process();
    }
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(attention_backward_bf16, 13, megatron_ext::AttentionTiling, megatron_ext::attention_backward<bfloat16_t>)
MEGATRON_EXT_LAUNCH(attention_backward_f16, 13, megatron_ext::AttentionTiling, megatron_ext::attention_backward<half>)
