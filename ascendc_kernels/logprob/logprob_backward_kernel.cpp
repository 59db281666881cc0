// Entry points of the gradient: operands logits, temperature, row_max, exp_sum, targets int64, grad, dlogits.
#include "logprob_backward_kernel.h"

#include "launch.h"

namespace megatron_ext {

template <typename Out>
__global__ __aicore__ void vocab_dlogits(GM_ADDR logits, GM_ADDR temperature, GM_ADDR row_max, GM_ADDR exp_sum, GM_ADDR targets, GM_ADDR grad,
                                         GM_ADDR dlogits, const LogprobTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    VocabDlogits<Out> op;
    op.Init(logits, temperature, row_max, exp_sum, targets, grad, dlogits, tiling, &pipe);
    op.Process();
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(vocab_dlogits_f32, 7, megatron_ext::LogprobTiling, megatron_ext::vocab_dlogits<float>)
MEGATRON_EXT_LAUNCH(vocab_dlogits_bf16, 7, megatron_ext::LogprobTiling, megatron_ext::vocab_dlogits<bfloat16_t>)
MEGATRON_EXT_LAUNCH(vocab_dlogits_f16, 7, megatron_ext::LogprobTiling, megatron_ext::vocab_dlogits<half>)
