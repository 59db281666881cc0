// Entry points of the gradient: operands da, gate_up, dgate_up.
#include "swiglu_backward_kernel.h"

#include "launch.h"

namespace megatron_ext {

template <typename T>
__global__ __aicore__ void swiglu_backward(GM_ADDR da, GM_ADDR gate_up, GM_ADDR dgate_up, const SwigluTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    SwigluBackward<T> op;
    op.Init(da, gate_up, dgate_up, tiling, &pipe);
    op.Process();
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(swiglu_backward_bf16, 3, megatron_ext::SwigluTiling, megatron_ext::swiglu_backward<bfloat16_t>)
MEGATRON_EXT_LAUNCH(swiglu_backward_f16, 3, megatron_ext::SwigluTiling, megatron_ext::swiglu_backward<half>)
