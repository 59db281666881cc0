// Entry points of embedding: operands ids int64, weight, y; of embedding_wgrad: ids int64, dy, grad fp32 (continued).
#include "embedding_kernel.h"

#include "launch.h"

namespace megatron_ext {

__global__ __aicore__ void embedding_lookup(GM_ADDR ids, GM_ADDR weight, GM_ADDR y, const EmbeddingTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    EmbeddingLookup<uint16_t> op;
    op.Init(ids, weight, y, tiling, &pipe);
    op.Process();
}

template <typename T>
__global__ __aicore__ void embedding_gradient(GM_ADDR ids, GM_ADDR dy, GM_ADDR grad, const EmbeddingTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    EmbeddingGradient<T> op;
    op.Init(ids, dy, grad, tiling, &pipe);
    op.Process();
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(embedding_b16, 3, megatron_ext::EmbeddingTiling, megatron_ext::embedding_lookup)
MEGATRON_EXT_LAUNCH(embedding_wgrad_bf16, 3, megatron_ext::EmbeddingTiling, megatron_ext::embedding_gradient<bfloat16_t>)
MEGATRON_EXT_LAUNCH(embedding_wgrad_f16, 3, megatron_ext::EmbeddingTiling, megatron_ext::embedding_gradient<half>)
