// Entry points of ordered_sum: operands parts fp32 [P, n], sum [n].
#include "ordered_sum_kernel.h"

#include "launch.h"

namespace megatron_ext {

template <typename Out>
__global__ __aicore__ void ordered_sum(GM_ADDR parts, GM_ADDR sum, const OrderedSumTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    OrderedSum<Out> op;
    op.Init(parts, sum, tiling, &pipe);
    op.Process();
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(ordered_sum_f32, 2, megatron_ext::OrderedSumTiling, megatron_ext::ordered_sum<float>)
MEGATRON_EXT_LAUNCH(ordered_sum_bf16, 2, megatron_ext::OrderedSumTiling, megatron_ext::ordered_sum<bfloat16_t>)
MEGATRON_EXT_LAUNCH(ordered_sum_f16, 2, megatron_ext::OrderedSumTiling, megatron_ext::ordered_sum<half>)
