// Entry points of swiglu: operands gate_up, a.
#include "swiglu_kernel.h"

#include "launch.h"

namespace megatron_ext {

template <typename T>
__global__ __aicore__ void swiglu(GM_ADDR gate_up, GM_ADDR a, const SwigluTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    Swiglu<T> op;
    op.Init(gate_up, a, tiling, &pipe);
    op.Process();
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(swiglu_bf16, 2, megatron_ext::SwigluTiling, megatron_ext::swiglu<bfloat16_t>)
MEGATRON_EXT_LAUNCH(swiglu_f16, 2, megatron_ext::SwigluTiling, megatron_ext::swiglu<half>)
