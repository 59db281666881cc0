// Entry points of route: operands logits fp32 [T][E], bias fp32 [E], weights fp32 [T][k], ids int64 [T][k]; of route_backward: dweights fp32 [T][k],
// logits, ids, dlogits fp32 [T][E].
#include "router_kernel.h"

#include "launch.h"
#include "router_backward_kernel.h"

namespace megatron_ext {

__global__ __aicore__ void route(GM_ADDR logits, GM_ADDR bias, GM_ADDR weights, GM_ADDR ids, const RouterTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    Router op;
    op.Init(logits, bias, weights, ids, tiling, &pipe);
    op.Process();
}

__global__ __aicore__ void route_backward(GM_ADDR dweights, GM_ADDR logits, GM_ADDR ids, GM_ADDR dlogits, const RouterTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    RouterBackward op;
    op.Init(dweights, logits, ids, dlogits, tiling, &pipe);
    op.Process();
}

}  // namespace megatron_ext

MEGATRON_EXT_LAUNCH(route_f32, 4, megatron_ext::RouterTiling, megatron_ext::route)
MEGATRON_EXT_LAUNCH(route_backward_f32, 4, megatron_ext::RouterTiling, megatron_ext::route_backward)
