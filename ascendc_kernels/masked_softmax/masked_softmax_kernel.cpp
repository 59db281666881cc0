// Entry points of masked_softmax: operands x, mask (bytes, or null), y; masked_softmax_backward: dp, p, dx.
#include "masked_softmax_backward_kernel.h"

#include "launch.h"

namespace megatron_ext {

template <typename T>
__global__ __aicore__ void masked_softmax(GM_ADDR x, GM_ADDR mask, GM_ADDR y, const MaskedSoftmaxTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    MaskedSoftmax<T> op;
    op.Init(x, mask, y, tiling, &pipe);
    op.Process();
}

template <typename T>
__global__ __aicore__ void masked_softmax_backward(GM_ADDR dp, GM_ADDR p, GM_ADDR dx, const MaskedSoftmaxTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    MaskedSoftmaxBackward<T> op;
    op.Init(dp, p, dx, tiling, &pipe);
    op.Process();
}

}  // namespace megatron_ext

#define MASKED_SOFTMAX_LAUNCH(suffix, T)                                                                                               \
    MEGATRON_EXT_LAUNCH(masked_softmax_##suffix, 3, megatron_ext::MaskedSoftmaxTiling, megatron_ext::masked_softmax<T>)                \
    MEGATRON_EXT_LAUNCH(masked_softmax_backward_##suffix, 3, megatron_ext::MaskedSoftmaxTiling, megatron_ext::masked_softmax_backward<T>)
MASKED_SOFTMAX_LAUNCH(f32, float)
MASKED_SOFTMAX_LAUNCH(bf16, bfloat16_t)
MASKED_SOFTMAX_LAUNCH(f16, half)
