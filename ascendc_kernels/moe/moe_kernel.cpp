// Entry points of combine and combine_rows: operands y, weights fp32, order int64 (rows by token, then expert), experts int64, starts int64 (of tokens in
// order), out; of combine_backward: dout fp32, y, weights, tokens int64, dy, dweights fp32; of unpermute: index int64, rows, out.
#include "../embedding/embedding_kernel.h"
#include "combine_kernel.h"

#include "launch.h"

namespace megatron_ext {

template <typename T, typename Out, bool kFinish>
__global__ __aicore__ void combine(GM_ADDR y, GM_ADDR weights, GM_ADDR order, GM_ADDR experts, GM_ADDR starts, GM_ADDR out, const CombineTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    Combine<T, Out, kFinish> op;
    op.Init(y, weights, order, experts, starts, out, tiling, &pipe);
    op.Process();
}

template <typename T>
__global__ __aicore__ void combine_backward(GM_ADDR dout, GM_ADDR y, GM_ADDR weights, GM_ADDR tokens, GM_ADDR dy, GM_ADDR dweights,
                                            const CombineBackwardTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    CombineBackward<T> op;
    op.Init(dout, y, weights, tokens, dy, dweights, tiling, &pipe);
    op.Process();
}

__global__ __aicore__ void unpermute(GM_ADDR index, GM_ADDR rows, GM_ADDR out, const EmbeddingTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    EmbeddingLookup<uint16_t, true> op;
    op.Init(index, rows, out, tiling, &pipe);
    op.Process();
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(combine_bf16, 6, megatron_ext::CombineTiling, megatron_ext::combine<bfloat16_t, float, false>)
MEGATRON_EXT_LAUNCH(combine_f16, 6, megatron_ext::CombineTiling, megatron_ext::combine<half, float, false>)
MEGATRON_EXT_LAUNCH(combine_rows_bf16, 6, megatron_ext::CombineTiling, megatron_ext::combine<bfloat16_t, bfloat16_t, true>)
MEGATRON_EXT_LAUNCH(combine_rows_f16, 6, megatron_ext::CombineTiling, megatron_ext::combine<half, half, true>)
MEGATRON_EXT_LAUNCH(combine_backward_bf16, 6, megatron_ext::CombineBackwardTiling, megatron_ext::combine_backward<bfloat16_t>)
MEGATRON_EXT_LAUNCH(combine_backward_f16, 6, megatron_ext::CombineBackwardTiling, megatron_ext::combine_backward<half>)
MEGATRON_EXT_LAUNCH(unpermute_b16, 3, megatron_ext::EmbeddingTiling, megatron_ext::unpermute)
