// Entry points. Operands: vocab_max: logits, temperature, row_max; vocab_exp_sum: logits, temperature, row_max, exp_sum; token_logprob:
// logits, temperature, ids, logprob, row_max, exp_sum; log_softmax: logits, temperature, logprobs; logprob_from_parts: target, row_max,
// exp_sum, logprob. All fp32, ids int64; temperature may be null.
#include "logprob_kernel.h"

#include "launch.h"

namespace megatron_ext {

template <typename Op, typename... Operands>
__aicore__ inline void run_logprob(const LogprobTiling& tiling, Operands... operands) {
    AscendC::TPipe pipe;
    Op op;
    op.Init(operands..., tiling, &pipe);
    op.Process();
}

__global__ __aicore__ void vocab_max(GM_ADDR logits, GM_ADDR temperature, GM_ADDR row_max, const LogprobTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    run_logprob<VocabMax>(tiling, logits, temperature, row_max);
}

__global__ __aicore__ void vocab_exp_sum(GM_ADDR logits, GM_ADDR temperature, GM_ADDR row_max, GM_ADDR exp_sum, const LogprobTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    run_logprob<VocabExpSum>(tiling, logits, temperature, row_max, exp_sum);
}

__global__ __aicore__ void token_logprob(GM_ADDR logits, GM_ADDR temperature, GM_ADDR ids, GM_ADDR logprob, GM_ADDR row_max, GM_ADDR exp_sum,
                                         const LogprobTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    run_logprob<TokenLogprob>(tiling, logits, temperature, ids, logprob, row_max, exp_sum);
}

__global__ __aicore__ void log_softmax(GM_ADDR logits, GM_ADDR temperature, GM_ADDR logprobs, const LogprobTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    run_logprob<LogSoftmax>(tiling, logits, temperature, logprobs);
}

__global__ __aicore__ void logprob_from_parts(GM_ADDR target, GM_ADDR row_max, GM_ADDR exp_sum, GM_ADDR logprob, const LogprobTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    run_logprob<LogprobFromParts>(tiling, target, row_max, exp_sum, logprob);
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(vocab_max_f32, 3, megatron_ext::LogprobTiling, megatron_ext::vocab_max)
MEGATRON_EXT_LAUNCH(vocab_exp_sum_f32, 4, megatron_ext::LogprobTiling, megatron_ext::vocab_exp_sum)
MEGATRON_EXT_LAUNCH(token_logprob_f32, 6, megatron_ext::LogprobTiling, megatron_ext::token_logprob)
MEGATRON_EXT_LAUNCH(log_softmax_f32, 3, megatron_ext::LogprobTiling, megatron_ext::log_softmax)
MEGATRON_EXT_LAUNCH(logprob_from_parts_f32, 4, megatron_ext::LogprobTiling, megatron_ext::logprob_from_parts)
