// Entry points. Operands, all fp32: gae: rewards [L][N], values, mask, bootstrap [N], advantages [L][N], returns; discounted_returns: rewards, mask,
// bootstrap, returns; masked_sum: x [N][L], mask, centre [1], sums [N]; total: x [N], total [1]; whiten: x, mask, mean [1], variance [1], y. A mask
// holds 0 for what is left out.
#include "masked_sum_kernel.h"

#include "launch.h"
#include "scan_kernel.h"

namespace megatron_ext {

__global__ __aicore__ void gae(GM_ADDR rewards, GM_ADDR values, GM_ADDR mask, GM_ADDR bootstrap, GM_ADDR advantages, GM_ADDR returns,
                               const ScanTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    Scan<true> op;
    op.Init(rewards, values, mask, bootstrap, advantages, returns, tiling, &pipe);
    op.Process();
}

__global__ __aicore__ void discounted_returns(GM_ADDR rewards, GM_ADDR mask, GM_ADDR bootstrap, GM_ADDR returns, const ScanTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    Scan<false> op;
    op.Init(rewards, nullptr, mask, bootstrap, nullptr, returns, tiling, &pipe);
    op.Process();
}

__global__ __aicore__ void masked_sum(GM_ADDR x, GM_ADDR mask, GM_ADDR centre, GM_ADDR sums, const MaskedSumTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    MaskedSum op;
    op.Init(x, mask, centre, sums, tiling, &pipe);
    op.Process();
}

__global__ __aicore__ void total(GM_ADDR x, GM_ADDR total, const TotalTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    Total op;
    op.Init(x, total, tiling, &pipe);
    op.Process();
}

__global__ __aicore__ void whiten(GM_ADDR x, GM_ADDR mask, GM_ADDR mean, GM_ADDR variance, GM_ADDR y, const WhitenTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    Whiten op;
    op.Init(x, mask, mean, variance, y, tiling, &pipe);
    op.Process();
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(gae_f32, 6, megatron_ext::ScanTiling, megatron_ext::gae)
MEGATRON_EXT_LAUNCH(discounted_returns_f32, 4, megatron_ext::ScanTiling, megatron_ext::discounted_returns)
MEGATRON_EXT_LAUNCH(masked_sum_f32, 4, megatron_ext::MaskedSumTiling, megatron_ext::masked_sum)
MEGATRON_EXT_LAUNCH(total_f32, 2, megatron_ext::TotalTiling, megatron_ext::total)
MEGATRON_EXT_LAUNCH(whiten_f32, 5, megatron_ext::WhitenTiling, megatron_ext::whiten)
