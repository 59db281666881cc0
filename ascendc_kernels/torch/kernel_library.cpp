// The kernels in use: on CPUs a library chosen by ascendc_kernels.library.use, on a device the one that use_device named.
#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <algorithm>
#include <mutex>

#include "binding.h"
#include "device_kernels.h"

namespace megatron_ext {
namespace {

constexpr int64_t kWorkPerThread = 1 << 15;  // elements below which waking a thread costs more than it saves

enum class Choice : int32_t { kPreferred, kKernel, kNative };

struct Library {
    void* handle = nullptr;
    Choice choice = Choice::kPreferred;
};
Library library;
const DeviceKernels* device_kernels = nullptr;
std::mutex library_mutex;
std::atomic<int64_t> library_generation{0};

void run_tasks(int64_t tasks, void (*task)(void*, int64_t), void* context) {
    at::parallel_for(0, tasks, 1, [=](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) task(context, i);
    });
}

const DeviceKernels& on_device(const at::Device& device) {
    TORCH_CHECK(device_kernels, "megatron_ext: no kernels for ", device, ": build them with ascendc_kernels/build.sh --soc SOC");
    return *device_kernels;
}

KernelFunction symbol(const std::string& name) { return reinterpret_cast<KernelFunction>(dlsym(library.handle, name.c_str())); }

}  // namespace

void Kernel::resolve() const {
    std::lock_guard<std::mutex> lock(library_mutex);
    TORCH_CHECK(library.handle, "megatron_ext: no kernel library is loaded; call ascendc_kernels.library.load() first");
    kernel_ = symbol("megatron_ext_" + name_);
    native_ = symbol("megatron_ext_" + name_ + "_native");
    TORCH_CHECK(kernel_ || native_, "megatron_ext: the kernel library has no ", name_, "; build it again: python -m ascendc_kernels.build");
    generation_ = library_generation.load();
}

const char* Kernel::run_on_cpu(KernelCall call, Path preferred) const {
    if (generation_ != library_generation) resolve();
    TORCH_CHECK(library.choice != Choice::kKernel || kernel_, "megatron_ext: MEGATRON_EXT_KERNEL_PATH=model, but ", name_, " has no Ascend C kernel");
    const bool wants_native = library.choice == Choice::kPreferred ? preferred == Path::kNative : library.choice == Choice::kNative;
    const KernelFunction function = (wants_native && native_) || !kernel_ ? native_ : kernel_;
    call.threads = {int32_t(at::get_num_threads()), &run_tasks};
    return function(&call);
}

const char* Kernel::run_on_device(KernelCall call, const at::Device& device) const {
    const KernelFunction function = on_device(device).find(("megatron_ext_" + name_).c_str());
    TORCH_CHECK(function, "megatron_ext: the device library has no ", name_, "; build it again: ascendc_kernels/build.sh --soc SOC");
    call.stream = device_kernels->current_stream(device.index());
    return function(&call);
}

void Kernel::run(const at::Device& device, std::initializer_list<const void*> operands, const void* tiling, int64_t blocks, Path preferred,
                 int64_t mmad_order) const {
    TORCH_CHECK_VALUE(mmad_order == 0 || mmad_order == 1, "megatron_ext: mmad_order must be 0 (sequential) or 1 (groups16), found ", mmad_order);
    const KernelCall call = {const_cast<void* const*>(operands.begin()), tiling, blocks, {1, nullptr}, int32_t(mmad_order), nullptr};
    const char* error = device.is_cpu() ? run_on_cpu(call, preferred) : run_on_device(call, device);
    TORCH_CHECK(error == nullptr, "megatron_ext: ", error);
}

int64_t vector_blocks(const at::Device& device, int64_t pieces, int64_t work) {
    const int64_t cores = device.is_cpu() ? std::min<int64_t>(at::get_num_threads(), work / kWorkPerThread) : on_device(device).vector_cores;
    return std::clamp<int64_t>(cores, 1, std::max<int64_t>(pieces, 1));
}

int64_t cube_blocks(const at::Device& device, int64_t pieces, int64_t work) {
    if (device.is_cpu()) return vector_blocks(device, pieces, work);
    return std::clamp<int64_t>(on_device(device).cube_cores, 1, std::max<int64_t>(pieces, 1));
}

}  // namespace megatron_ext

// choice: 0 each operator's preference, 1 always the Ascend C kernel, 2 the native twin wherever there is one.
extern "C" __attribute__((visibility("default"))) const char* megatron_ext_use_kernels(const char* file, int32_t choice) {
    using namespace megatron_ext;
    std::lock_guard<std::mutex> lock(library_mutex);
    void* handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return dlerror();
    library = {handle, Choice(choice)};
    ++library_generation;
    return nullptr;
}

extern "C" __attribute__((visibility("default"))) void megatron_ext_use_device(const megatron_ext::DeviceKernels* kernels) {
    megatron_ext::device_kernels = kernels;
}
