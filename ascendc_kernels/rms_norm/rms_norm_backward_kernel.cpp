// Entry points of the gradients: rms_norm_dx: operands dy, x, weight, dx, rstd fp32; rms_norm_dw: dy, x, rstd, dw fp32 (continued).
#include "rms_norm_backward_kernel.h"

#include "launch.h"

namespace megatron_ext {

template <typename T>
__global__ __aicore__ void rms_norm_dx(GM_ADDR dy, GM_ADDR x, GM_ADDR weight, GM_ADDR dx, GM_ADDR rstd, const RmsNormTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    RmsNormInputGradient<T> op;
    op.Init(dy, x, weight, dx, rstd, tiling, &pipe);
    op.Process();
}

template <typename T>
__global__ __aicore__ void rms_norm_dw(GM_ADDR dy, GM_ADDR x, GM_ADDR rstd, GM_ADDR dw, const RmsNormTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    RmsNormWeightGradient<T> op;
    op.Init(dy, x, rstd, dw, tiling, &pipe);
    op.Process();
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(rms_norm_dx_bf16, 5, megatron_ext::RmsNormTiling, megatron_ext::rms_norm_dx<bfloat16_t>)
MEGATRON_EXT_LAUNCH(rms_norm_dx_f16, 5, megatron_ext::RmsNormTiling, megatron_ext::rms_norm_dx<half>)
MEGATRON_EXT_LAUNCH(rms_norm_dw_bf16, 4, megatron_ext::RmsNormTiling, megatron_ext::rms_norm_dw<bfloat16_t>)
MEGATRON_EXT_LAUNCH(rms_norm_dw_f16, 4, megatron_ext::RmsNormTiling, megatron_ext::rms_norm_dw<half>)
