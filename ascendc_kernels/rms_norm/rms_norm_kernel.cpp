// Entry points of rms_norm: operands x, weight, y; add_rms_norm: x, residual, weight, y, sum.
#include "rms_norm_kernel.h"

#include "launch.h"

namespace megatron_ext {

template <typename T>
__global__ __aicore__ void rms_norm(GM_ADDR x, GM_ADDR weight, GM_ADDR y, const RmsNormTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    RmsNorm<T, false> op;
    op.Init(x, nullptr, weight, y, nullptr, tiling, &pipe);
    op.Process();
}

template <typename T>
__global__ __aicore__ void add_rms_norm(GM_ADDR x, GM_ADDR residual, GM_ADDR weight, GM_ADDR y, GM_ADDR sum, const RmsNormTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    RmsNorm<T, true> op;
    op.Init(x, residual, weight, y, sum, tiling, &pipe);
    op.Process();
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(rms_norm_bf16, 3, megatron_ext::RmsNormTiling, megatron_ext::rms_norm<bfloat16_t>)
MEGATRON_EXT_LAUNCH(rms_norm_f16, 3, megatron_ext::RmsNormTiling, megatron_ext::rms_norm<half>)
MEGATRON_EXT_LAUNCH(add_rms_norm_bf16, 5, megatron_ext::RmsNormTiling, megatron_ext::add_rms_norm<bfloat16_t>)
MEGATRON_EXT_LAUNCH(add_rms_norm_f16, 5, megatron_ext::RmsNormTiling, megatron_ext::add_rms_norm<half>)
