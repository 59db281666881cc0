// Entry points of rotary: operands x, keys, cos, sin, y, rotated keys; keys may be absent (their heads are 0 then).
#include "rotary_kernel.h"

#include "launch.h"

namespace megatron_ext {

template <typename T>
__global__ __aicore__ void rotary(GM_ADDR x, GM_ADDR keys, GM_ADDR cos, GM_ADDR sin, GM_ADDR y, GM_ADDR rotated_keys, const RotaryTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    Rotary<T> op;
    op.Init(x, keys, cos, sin, y, rotated_keys, tiling, &pipe);
    op.Process();
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(rotary_bf16, 6, megatron_ext::RotaryTiling, megatron_ext::rotary<bfloat16_t>)
MEGATRON_EXT_LAUNCH(rotary_f16, 6, megatron_ext::RotaryTiling, megatron_ext::rotary<half>)
