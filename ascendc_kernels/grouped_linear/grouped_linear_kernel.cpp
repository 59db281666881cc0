// Entry points of grouped_linear, grouped_dgrad and its fp32 form: operands a [R][k], b [E], counts int64 [E], out [R][n], workspace fp32 (see
// LinearBlock::Workspace).
#include "grouped_linear_kernel.h"

#include "launch.h"

namespace megatron_ext {

template <typename T, typename Out>
__global__ __aicore__ void grouped_linear(GM_ADDR a, GM_ADDR b, GM_ADDR counts, GM_ADDR out, GM_ADDR workspace, const GroupedLinearTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    AscendC::TPipe pipe;
    GroupedLinearTiles tiles(counts, tiling);
    if (ASCEND_IS_AIC) {
        LinearPieces<T> op;
        op.Init(a, b, workspace, tiles, &pipe);
        op.Process(tiles);
    } else {
        LinearTree<Out> op;
        op.Init(workspace, out, tiling.linear, &pipe);
        op.Process(tiles);
    }
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(grouped_linear_bf16, 5, megatron_ext::GroupedLinearTiling, megatron_ext::grouped_linear<bfloat16_t, bfloat16_t>)
MEGATRON_EXT_LAUNCH(grouped_linear_f16, 5, megatron_ext::GroupedLinearTiling, megatron_ext::grouped_linear<half, half>)
MEGATRON_EXT_LAUNCH(grouped_linear_fp32_bf16, 5, megatron_ext::GroupedLinearTiling, megatron_ext::grouped_linear<bfloat16_t, float>)
MEGATRON_EXT_LAUNCH(grouped_linear_fp32_f16, 5, megatron_ext::GroupedLinearTiling, megatron_ext::grouped_linear<half, float>)
