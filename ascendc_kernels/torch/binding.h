// What every <op>_binding.cpp uses: choosing and calling kernels, allocation, argument checks.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <initializer_list>
#include <string>

#include "kernel_call.h"

namespace megatron_ext {

// Which of the two implementations of equal bits a call on a CPU takes. A device has the kernel only.
enum class Path { kKernel, kNative };

// A kernel for one dtype, by the name that its launch file exports; resolved in the library that is in use.
class Kernel {
 public:
    explicit Kernel(std::string name) : name_(std::move(name)) {}

    // device: where the operands are. preferred: what a CPU takes unless `use_kernels` forced one. Raises what the kernel reports.
    void run(const at::Device& device, std::initializer_list<const void*> operands, const void* tiling, int64_t blocks, Path preferred,
             int64_t mmad_order = 0) const;

 private:
    const std::string name_;
    mutable std::atomic<int64_t> generation_{-1};
    mutable std::atomic<KernelFunction> kernel_{nullptr}, native_{nullptr};

    void resolve() const;
    const char* run_on_cpu(KernelCall call, Path preferred) const;
    const char* run_on_device(KernelCall call, const at::Device& device) const;
};

// The kernels <name>_bf16 and <name>_f16.
class ModelDtypeKernels {
 public:
    explicit ModelDtypeKernels(const std::string& name) : bf16_(name + "_bf16"), f16_(name + "_f16") {}
    const Kernel& operator[](at::ScalarType dtype) const { return dtype == at::kBFloat16 ? bf16_ : f16_; }

 private:
    Kernel bf16_, f16_;
};

// Blocks for work that can be cut into `pieces`: on a CPU one per thread, and one thread below `work_per_thread` elements of work; on a
// device one per core.
int64_t vector_blocks(const at::Device& device, int64_t pieces, int64_t work);
int64_t cube_blocks(const at::Device& device, int64_t pieces, int64_t work);

inline const void* data(const at::Tensor& tensor) { return tensor.const_data_ptr(); }
inline void* mutable_data(const at::Tensor& tensor) { return tensor.mutable_data_ptr(); }

inline bool is_model_dtype(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

inline void check_model_dtype(const char* op, const char* name, const at::Tensor& tensor) {
    TORCH_CHECK_TYPE(is_model_dtype(tensor.scalar_type()), op, ": ", name, " must be bfloat16 or float16, found ", tensor.scalar_type());
}

inline void check_same_dtype(const char* op, const char* name, const at::Tensor& tensor, at::ScalarType dtype) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, op, ": ", name, " must be ", dtype, ", found ", tensor.scalar_type());
}

inline void check_same_device(const char* op, const char* name, const at::Tensor& tensor, const at::Device& device) {
    TORCH_CHECK(tensor.device() == device, op, ": ", name, " must be on ", device, ", found ", tensor.device());
}

// An operand of `dtype` on `device`.
inline void check_operand(const char* op, const char* name, const at::Tensor& tensor, at::ScalarType dtype, const at::Device& device) {
    check_same_dtype(op, name, tensor, dtype);
    check_same_device(op, name, tensor, device);
}

// An accumulator that is written in place.
inline void check_accumulator(const char* op, const char* name, const at::Tensor& tensor, const at::Device& device) {
    check_operand(op, name, tensor, at::kFloat, device);
    TORCH_CHECK_VALUE(tensor.is_contiguous(), op, ": ", name, " must be contiguous, found strides ", tensor.strides());
}

}  // namespace megatron_ext

// The same functions serve both: what differs is behind Kernel::run.
#define MEGATRON_EXT_IMPLEMENT(implement)                                       \
    TORCH_LIBRARY_IMPL(megatron_ext, CPU, library) { implement(library); }      \
    TORCH_LIBRARY_IMPL(megatron_ext, PrivateUse1, library) { implement(library); }
