// The kernel library in use on this CPU: loaded by ascendc_kernels.library.use, asked by Kernel::run.
#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <algorithm>
#include <mutex>

#include "binding.h"

namespace megatron_ext {
namespace {

constexpr int64_t kWorkPerThread = 1 << 15;  // elements below which waking a thread costs more than it saves

enum class Choice : int32_t { kPreferred, kKernel, kNative };

struct Library {
    void* handle = nullptr;
    Choice choice = Choice::kPreferred;
};
Library library;
std::mutex library_mutex;
std::atomic<int64_t> library_generation{0};

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

void Kernel::run(const at::Device& device, std::initializer_list<const void*> operands, const void* tiling, int64_t blocks, Path preferred,
                 int64_t mmad_order) const {
    TORCH_CHECK(device.is_cpu(), "megatron_ext: ", name_, " was built for CPUs, its operands are on ", device);
    TORCH_CHECK_VALUE(mmad_order == 0 || mmad_order == 1, "megatron_ext: mmad_order must be 0 (sequential) or 1 (groups16), found ", mmad_order);
    if (generation_ != library_generation) resolve();
    const bool wants_native = library.choice == Choice::kPreferred ? preferred == Path::kNative : library.choice == Choice::kNative;
    const KernelFunction function = (wants_native && native_) || !kernel_ ? native_ : kernel_;
    const KernelCall call = {const_cast<void* const*>(operands.begin()), tiling, blocks, int32_t(at::get_num_threads()), int32_t(mmad_order), nullptr};
    const char* error = function(&call);
    TORCH_CHECK(error == nullptr, "megatron_ext: ", error);
}

int64_t vector_blocks(const at::Device&, int64_t pieces, int64_t work) {
    return std::clamp<int64_t>(std::min<int64_t>(at::get_num_threads(), work / kWorkPerThread), 1, std::max<int64_t>(pieces, 1));
}

int64_t cube_blocks(const at::Device& device, int64_t pieces, int64_t work) { return vector_blocks(device, pieces, work); }

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
