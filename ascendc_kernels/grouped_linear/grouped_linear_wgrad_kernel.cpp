// Entry points of grouped_wgrad_: operands addresses int64 [E] of gradients fp32 [n][k] (continued), dy, x, counts int64 [E], boundaries int64
// [sequences + 1], workspace (see LinearWgradWorkspace).
#include "grouped_linear_wgrad_kernel.h"

#include "launch.h"

namespace megatron_ext {

template <typename T>
__global__ __aicore__ void grouped_linear_wgrad(GM_ADDR addresses, GM_ADDR dy, GM_ADDR x, GM_ADDR counts, GM_ADDR boundaries, GM_ADDR memory,
                                                const GroupedLinearWgradTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    AscendC::TPipe pipe;
    GroupedLinearWgradTiles tiles(counts, boundaries, tiling);
    LinearWgradWorkspace workspace;
    workspace.Init(memory, tiles);
    if (ASCEND_IS_AIC) {
        LinearWgradSum<T> op;
        op.Init(dy, x, boundaries, workspace, tiles, &pipe);
        op.Process(tiles);
    } else {
        GroupedLinearGradients gradients;
        gradients.Init(addresses, tiling.experts, uint64_t(tiling.linear.n * tiling.linear.k));
        LinearWgradAccumulator<GroupedLinearGradients> op;
        op.Init(gradients, workspace, tiles, &pipe);
        op.Process(tiles);
    }
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(grouped_linear_wgrad_bf16, 6, megatron_ext::GroupedLinearWgradTiling, megatron_ext::grouped_linear_wgrad<bfloat16_t>)
MEGATRON_EXT_LAUNCH(grouped_linear_wgrad_f16, 6, megatron_ext::GroupedLinearWgradTiling, megatron_ext::grouped_linear_wgrad<half>)
