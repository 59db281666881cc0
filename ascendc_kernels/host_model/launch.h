// Launch of a kernel on the host model. ../npu/launch.h defines the same macro for a device; the include path decides.
#pragma once
#include <utility>

#include "kernel_call.h"
#include "runtime.h"

namespace ascendc_host {

template <auto kernel, typename Tiling, size_t... operand>
inline const char* launch_kernel(const char* name, const megatron_ext::KernelCall& call, std::index_sequence<operand...>) {
    const Tiling& tiling = *static_cast<const Tiling*>(call.tiling);
    return launch({name, call.blocks, call.threads.count, call.mmad_order}, [&] { kernel(static_cast<GM_ADDR>(call.operands[operand])..., tiling); });
}

}  // namespace ascendc_host

// Exports megatron_ext_<name>, which launches a kernel of that many GM_ADDR parameters and a tiling struct.
#define MEGATRON_EXT_LAUNCH(name, operands, Tiling, ...)                                                                                     \
    extern "C" __attribute__((visibility("default"))) const char* megatron_ext_##name(const megatron_ext::KernelCall* call) {                \
        return ascendc_host::launch_kernel<__VA_ARGS__, Tiling>(#name, *call, std::make_index_sequence<operands>());                         \
    }
