// Entry points. Operands: sample: logits fp32 [T][V], temperature fp32, seeds int64 [T], positions int64 [T], top_k int64 [T], top_p fp32 [T],
// log_min_p fp32 [T], tokens int64 [T], last int64 [T]; support_mask: logits, last, mask uint8 [T][V]; beam_step: scores fp32 [B][W], logprobs fp32
// [B][W][V], kept scores fp32 [B][k], parents int64 [B][k], tokens int64 [B][k]. Temperature and filters may be null.
#include "sampling_kernel.h"

#include "beam_kernel.h"
#include "launch.h"

namespace megatron_ext {

__global__ __aicore__ void sample(GM_ADDR logits, GM_ADDR temperature, GM_ADDR seeds, GM_ADDR positions, GM_ADDR top_k, GM_ADDR top_p,
                                  GM_ADDR log_min_p, GM_ADDR tokens, GM_ADDR last, const SamplingTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    Sample op;
    op.Init(logits, temperature, seeds, positions, top_k, top_p, log_min_p, tokens, last, tiling, &pipe);
    op.Process();
}

__global__ __aicore__ void support_mask(GM_ADDR logits, GM_ADDR last, GM_ADDR mask, const SamplingTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    SupportMask op;
    op.Init(logits, last, mask, tiling, &pipe);
    op.Process();
}

__global__ __aicore__ void beam_step(GM_ADDR scores, GM_ADDR logprobs, GM_ADDR kept_scores, GM_ADDR parents, GM_ADDR tokens, const BeamTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    BeamStep op;
    op.Init(scores, logprobs, kept_scores, parents, tokens, tiling, &pipe);
    op.Process();
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(sample_f32, 9, megatron_ext::SamplingTiling, megatron_ext::sample)
MEGATRON_EXT_LAUNCH(support_mask_f32, 3, megatron_ext::SamplingTiling, megatron_ext::support_mask)
MEGATRON_EXT_LAUNCH(beam_step_f32, 5, megatron_ext::BeamTiling, megatron_ext::beam_step)
