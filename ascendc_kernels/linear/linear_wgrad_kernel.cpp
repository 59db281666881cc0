// Entry points of wgrad_: operands grad fp32 [n][k] (continued), dy, x, boundaries int64 [sequences + 1], workspace (see LinearWgradWorkspace).
#include "linear_wgrad_kernel.h"

#include "launch.h"

namespace megatron_ext {

template <typename T>
__global__ __aicore__ void linear_wgrad(GM_ADDR grad, GM_ADDR dy, GM_ADDR x, GM_ADDR boundaries, GM_ADDR memory, const LinearWgradTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    AscendC::TPipe pipe;
    LinearWgradTiles tiles(tiling);
    LinearWgradWorkspace workspace;
    workspace.Init(memory, tiles);
    if (ASCEND_IS_AIC) {
        LinearWgradSum<T> op;
        op.Init(dy, x, boundaries, workspace, tiles, &pipe);
        op.Process(tiles);
    } else {
        LinearWgradGradient gradient;
        gradient.Init(grad, uint64_t(tiling.n * tiling.k));
        LinearWgradAccumulator<LinearWgradGradient> op;
        op.Init(gradient, workspace, tiles, &pipe);
        op.Process(tiles);
    }
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(linear_wgrad_bf16, 5, megatron_ext::LinearWgradTiling, megatron_ext::linear_wgrad<bfloat16_t>)
MEGATRON_EXT_LAUNCH(linear_wgrad_f16, 5, megatron_ext::LinearWgradTiling, megatron_ext::linear_wgrad<half>)
