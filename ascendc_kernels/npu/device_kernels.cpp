// The kernels of this library, for the torch binding. Built by ../CMakeLists.txt with torch_npu and CANN. Has not run on a device.
#include "device_kernels.h"

#include <dlfcn.h>

#include "tiling/platform/platform_ascendc.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"

namespace {

megatron_ext::KernelFunction find(const char* symbol) {
    static void* const self = [] {
        Dl_info info;
        return dladdr(reinterpret_cast<void*>(&find), &info) ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD) : nullptr;
    }();
    return self == nullptr ? nullptr : reinterpret_cast<megatron_ext::KernelFunction>(dlsym(self, symbol));
}

// stream() waits for torch_npu's queue of operators that are not launched yet: a kernel must not overtake what produces its operands.
void* current_stream(int device_index) { return c10_npu::getCurrentNPUStream(c10::DeviceIndex(device_index)).stream(); }

}  // namespace

extern "C" __attribute__((visibility("default"))) const megatron_ext::DeviceKernels* megatron_ext_device_kernels() {
    static const megatron_ext::DeviceKernels kernels = [] {
        auto* platform = platform_ascendc::PlatformAscendCManager::GetInstance();
        return megatron_ext::DeviceKernels{&find, &current_stream, int64_t(platform->GetCoreNumAiv()), int64_t(platform->GetCoreNumAic())};
    }();
    return &kernels;
}
