// Entry points of exp and log: operands x fp32, y fp32; of row_sum: x fp32 [rows, width], sums fp32 [rows].
#include "elementary_kernel.h"

#include "launch.h"
#include "row_sum_kernel.h"

namespace megatron_ext {

template <ElementwiseFunction kFunction>
__global__ __aicore__ void elementwise(GM_ADDR x, GM_ADDR y, const ElementwiseTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    Elementwise<kFunction> op;
    op.Init(x, y, tiling, &pipe);
    op.Process();
}

__global__ __aicore__ void row_sums(GM_ADDR x, GM_ADDR sums, const RowSumTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    RowSum op;
    op.Init(x, sums, tiling, &pipe);
    op.Process();
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(exp_f32, 2, megatron_ext::ElementwiseTiling, megatron_ext::elementwise<megatron_ext::ElementwiseFunction::kExp>)
MEGATRON_EXT_LAUNCH(log_f32, 2, megatron_ext::ElementwiseTiling, megatron_ext::elementwise<megatron_ext::ElementwiseFunction::kLog>)
MEGATRON_EXT_LAUNCH(row_sum_f32, 2, megatron_ext::RowSumTiling, megatron_ext::row_sums)
