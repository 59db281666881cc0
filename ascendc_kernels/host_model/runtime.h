// Host side: runs a kernel over blocks. Kernels do not include this.
#pragma once
#include <cstdint>

#include "build_flavour.h"

namespace ascendc_host {

struct LaunchOptions {
    const char* kernel;   // name for messages
    int64_t blocks;       // as between <<< and >>>
    int threads = 1;      // results do not depend on it; the checked flavour always uses one
    int mmad_order = 0;   // megatron_ext::MmadOrder
};

using KernelBody = void (*)(const void* arguments);

// Returns nullptr, or what went wrong; the text lives until this thread's next launch.
const char* launch_blocks(const LaunchOptions& options, bool checked, KernelBody body, const void* arguments);

// call: a callable that calls the kernel entry, such as [=] { add_kernel(x, y, z, tiling); }. It runs once per core.
template <typename Call>
const char* launch(const LaunchOptions& options, const Call& call) {
    const KernelBody body = [](const void* arguments) { (*static_cast<const Call*>(arguments))(); };
    return launch_blocks(options, kChecked, body, &call);
}

}  // namespace ascendc_host
