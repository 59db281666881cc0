// Entry points of the probe. probe_mmad: operands a, b, c fp32 [blocks][m][n]; probe_vector: x, y, out fp32 [blocks][results]; probe_flags and
// probe_sync: x, y fp32.
#include "probe_mmad_kernel.h"

#include "launch.h"
#include "probe_flags_kernel.h"
#include "probe_sync_kernel.h"
#include "probe_vector_kernel.h"

namespace megatron_ext {

template <typename T>
__global__ __aicore__ void probe_mmad(GM_ADDR a, GM_ADDR b, GM_ADDR c, const ProbeMmadTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
    AscendC::TPipe pipe;
    ProbeMmad<T> op;
    op.Init(a, b, c, tiling, &pipe);
    op.Process();
}

__global__ __aicore__ void probe_vector(GM_ADDR x, GM_ADDR y, GM_ADDR out, const ProbeVectorTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    ProbeVector op;
    op.Init(x, y, out, tiling, &pipe);
    op.Process();
}

__global__ __aicore__ void probe_flags(GM_ADDR x, GM_ADDR y, const ProbeFlagsTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    ProbeFlags op;
    op.Init(x, y, tiling, &pipe);
    op.Process();
}

// A MIX type: an AIV_ONLY kernel has no cross-core scheduler.
__global__ __aicore__ void probe_sync(GM_ADDR x, GM_ADDR y, const ProbeSyncTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    AscendC::TPipe pipe;
    ProbeSync op;
    op.Init(x, y, tiling, &pipe);
    op.Process();
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(probe_mmad_bf16, 3, megatron_ext::ProbeMmadTiling, megatron_ext::probe_mmad<bfloat16_t>)
MEGATRON_EXT_LAUNCH(probe_mmad_f16, 3, megatron_ext::ProbeMmadTiling, megatron_ext::probe_mmad<half>)
MEGATRON_EXT_LAUNCH(probe_vector_f32, 3, megatron_ext::ProbeVectorTiling, megatron_ext::probe_vector)
MEGATRON_EXT_LAUNCH(probe_flags_f32, 2, megatron_ext::ProbeFlagsTiling, megatron_ext::probe_flags)
MEGATRON_EXT_LAUNCH(probe_sync_f32, 2, megatron_ext::ProbeSyncTiling, megatron_ext::probe_sync)
