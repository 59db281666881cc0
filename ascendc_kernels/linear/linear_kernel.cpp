// Entry points of linear, dgrad and their fp32 forms: operands a [m][k], b, out [m][n], workspace fp32 (see LinearBlock::Workspace).
#include "linear_kernel.h"

#include "launch.h"

namespace megatron_ext {

template <typename T, typename Out>
__global__ __aicore__ void linear(GM_ADDR a, GM_ADDR b, GM_ADDR out, GM_ADDR workspace, const LinearTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    AscendC::TPipe pipe;
    LinearTiles tiles(tiling);
    if (ASCEND_IS_AIC) {
        LinearPieces<T> op;
        op.Init(a, b, workspace, tiles, &pipe);
        op.Process(tiles);
    } else {
        LinearTree<Out> op;
        op.Init(workspace, out, tiling, &pipe);
        op.Process(tiles);
    }
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(linear_bf16, 4, megatron_ext::LinearTiling, megatron_ext::linear<bfloat16_t, bfloat16_t>)
MEGATRON_EXT_LAUNCH(linear_f16, 4, megatron_ext::LinearTiling, megatron_ext::linear<half, half>)
MEGATRON_EXT_LAUNCH(linear_fp32_bf16, 4, megatron_ext::LinearTiling, megatron_ext::linear<bfloat16_t, float>)
MEGATRON_EXT_LAUNCH(linear_fp32_f16, 4, megatron_ext::LinearTiling, megatron_ext::linear<half, float>)
