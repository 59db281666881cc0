// torch.ops.megatron_ext: probe_mmad, probe_vector, probe_flags, probe_sync. Not for training or rollout: they ask a device how it computes.
#include <ATen/ops/full.h>

#include <limits>
#include <string_view>

#include "binding.h"
#include "differentiable.h"
#include "probe_tiling.h"

namespace megatron_ext {
namespace {

constexpr int64_t kFractal = MEGATRON_EXT_FRACTAL;

int64_t padded(int64_t size) { return (size + kFractal - 1) / kFractal * kFractal; }

void check_blocks(const char* op, int64_t blocks) { TORCH_CHECK_VALUE(blocks >= 1, op, ": blocks must be at least 1, found ", blocks); }

void check_mmad(const at::Tensor& a, const at::Tensor& b, int64_t m, int64_t k, int64_t call_k, int64_t blocks) {
    const char* const op = "probe_mmad";
    check_model_dtype(op, "a", a);
    check_operand(op, "b", b, a.scalar_type(), a.device());
    TORCH_CHECK_VALUE(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(1), op, ": a must be [rows, K] and b [n, K], found ", a.sizes(), " and ",
                      b.sizes());
    const int64_t n = b.size(0), stored = a.size(1);
    TORCH_CHECK_VALUE((m == 1 || m % kFractal == 0) && m > 0 && m <= kProbeMaxTile, op, ": m must be 1 or a multiple of 16 up to ", kProbeMaxTile,
                      ", found ", m);
    TORCH_CHECK_VALUE(a.size(0) == padded(m), op, ": m=", m, " needs ", padded(m), " rows of a, found ", a.size(0));
    TORCH_CHECK_VALUE(n > 0 && n % kFractal == 0 && n <= kProbeMaxTile, op, ": b must have a multiple of 16 rows up to ", kProbeMaxTile, ", found ",
                      n);
    TORCH_CHECK_VALUE(stored > 0 && stored % kFractal == 0 && stored <= kProbeMaxK, op, ": K must be a multiple of 16 up to ", kProbeMaxK,
                      ", found ", stored);
    TORCH_CHECK_VALUE(k > 0 && k <= stored, op, ": k must be from 1 to ", stored, ", found ", k);
    TORCH_CHECK_VALUE(call_k > 0 && call_k % kFractal == 0, op, ": call_k must be a multiple of 16, found ", call_k);
    check_blocks(op, blocks);
}

at::Tensor probe_mmad(const at::Tensor& a, const at::Tensor& b, int64_t m, int64_t k, int64_t call_k, int64_t blocks, int64_t mmad_order) {
    static const ModelDtypeKernels kernels("probe_mmad");
    check_mmad(a, b, m, k, call_k, blocks);
    const at::Tensor dense_a = a.contiguous(), dense_b = b.contiguous();
    at::Tensor c = at::empty({blocks, m, b.size(0)}, a.options().dtype(at::kFloat));
    const ProbeMmadTiling tiling = {m, b.size(0), k, a.size(1), call_k};
    kernels[a.scalar_type()].run(a.device(), {data(dense_a), data(dense_b), mutable_data(c)}, &tiling, blocks, Path::kKernel, mmad_order);
    return c;
}

int64_t operation_of(std::string_view name) {
    int64_t operation = 0;
    while (operation < kProbeOperations && name != kProbeOperationNames[operation]) ++operation;
    TORCH_CHECK_VALUE(operation < kProbeOperations, "probe_vector: no operation ", name);
    return operation;
}

template <typename Size>
Size results_of(int64_t operation, const Size& size, int64_t count) {
    if (operation == kProbeSum) return Size(1);
    return operation == kProbeRepeatSum ? size / kProbeRepeat : Size(count);
}

int64_t checked_results(std::string_view name, const at::Tensor& x, const at::Tensor& y, int64_t count, int64_t blocks) {
    const char* const op = "probe_vector";
    const int64_t operation = operation_of(name), size = x.numel();
    check_same_dtype(op, "x", x, at::kFloat);
    check_operand(op, "y", y, at::kFloat, x.device());
    TORCH_CHECK_VALUE(x.dim() == 1 && y.sizes() == x.sizes(), op, ": x and y must be [n], found ", x.sizes(), " and ", y.sizes());
    TORCH_CHECK_VALUE(size > 0 && size % kProbeRepeat == 0 && size <= kProbeMaxSize, op, ": n must be a multiple of 64 up to ", kProbeMaxSize,
                      ", found ", size);
    const int64_t most = operation == kProbeRepeatSum ? kProbeRepeat : size;
    TORCH_CHECK_VALUE(count > 0 && count <= most, op, ": count must be from 1 to ", most, " for ", name, ", found ", count);
    check_blocks(op, blocks);
    return results_of(operation, size, count);
}

at::Tensor probe_vector(std::string_view operation, const at::Tensor& x, const at::Tensor& y, int64_t count, int64_t blocks) {
    static const Kernel kernel("probe_vector_f32");
    const int64_t results = checked_results(operation, x, y, count, blocks);
    const at::Tensor dense_x = x.contiguous(), dense_y = y.contiguous();
    at::Tensor out = at::empty({blocks, results}, x.options());
    const ProbeVectorTiling tiling = {operation_of(operation), x.numel(), count, results};
    kernel.run(x.device(), {data(dense_x), data(dense_y), mutable_data(out)}, &tiling, blocks, Path::kKernel);
    return out;
}

void check_rows(const char* op, const at::Tensor& x) {
    check_same_dtype(op, "x", x, at::kFloat);
    TORCH_CHECK_VALUE(x.dim() == 2 && x.size(0) > 0 && x.size(1) == kProbeRow, op, ": x must be [rows, ", kProbeRow, "], found ", x.sizes());
}

void check_flags(const at::Tensor& x, int64_t blocks) {
    check_rows("probe_flags", x);
    check_blocks("probe_flags", blocks);
}

at::Tensor probe_flags(const at::Tensor& x, int64_t blocks) {
    static const Kernel kernel("probe_flags_f32");
    check_flags(x, blocks);
    const at::Tensor dense = x.contiguous();
    at::Tensor y = at::empty(x.sizes(), x.options());
    const ProbeFlagsTiling tiling = {x.size(0)};
    kernel.run(x.device(), {data(dense), mutable_data(y)}, &tiling, blocks, Path::kKernel);
    return y;
}

void check_sync(const at::Tensor& x, int64_t rounds) {
    check_rows("probe_sync", x);
    TORCH_CHECK_VALUE(rounds >= 1, "probe_sync: rounds must be at least 1, found ", rounds);
}

// What no core has written yet is NaN, so that a core that is ahead of another cannot find the result of an earlier call.
at::Tensor probe_sync(const at::Tensor& x, int64_t rounds) {
    static const Kernel kernel("probe_sync_f32");
    check_sync(x, rounds);
    const at::Tensor dense = x.contiguous();
    at::Tensor y = at::full({rounds, x.size(0), kProbeRow}, std::numeric_limits<double>::quiet_NaN(), x.options());
    const ProbeSyncTiling tiling = {rounds};
    kernel.run(x.device(), {data(dense), mutable_data(y)}, &tiling, x.size(0), Path::kKernel);
    return y;
}

// Shapes only; sizes may be symbols.
at::Tensor probe_mmad_meta(const at::Tensor& a, const at::Tensor& b, int64_t m, int64_t, int64_t, int64_t blocks, int64_t) {
    return at::empty_symint({blocks, m, b.sym_size(0)}, a.options().dtype(at::kFloat));
}

at::Tensor probe_vector_meta(std::string_view operation, const at::Tensor& x, const at::Tensor&, int64_t count, int64_t blocks) {
    const c10::SymInt results = results_of<c10::SymInt>(operation_of(operation), x.sym_numel(), count);
    return at::empty_symint({blocks, results}, x.options());
}

at::Tensor probe_flags_meta(const at::Tensor& x, int64_t) { return at::empty_symint(x.sym_sizes(), x.options()); }

at::Tensor probe_sync_meta(const at::Tensor& x, int64_t rounds) { return at::empty_symint({rounds, x.sym_size(0), kProbeRow}, x.options()); }

void implement(torch::Library& library) {
    library.impl("probe_mmad", &probe_mmad);
    library.impl("probe_vector", &probe_vector);
    library.impl("probe_flags", &probe_flags);
    library.impl("probe_sync", &probe_sync);
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_FRAGMENT(megatron_ext, library) {
    library.def("probe_mmad(Tensor a, Tensor b, int m, int k, int call_k, int blocks=1, int mmad_order=0) -> Tensor");
    library.def("probe_vector(str operation, Tensor x, Tensor y, int count, int blocks=1) -> Tensor");
    library.def("probe_flags(Tensor x, int blocks=1) -> Tensor");
    library.def("probe_sync(Tensor x, int rounds) -> Tensor");
}
TORCH_LIBRARY_IMPL(megatron_ext, Meta, library) {
    library.impl("probe_mmad", &megatron_ext::probe_mmad_meta);
    library.impl("probe_vector", &megatron_ext::probe_vector_meta);
    library.impl("probe_flags", &megatron_ext::probe_flags_meta);
    library.impl("probe_sync", &megatron_ext::probe_sync_meta);
}
TORCH_LIBRARY_IMPL(megatron_ext, Autograd, library) {
    megatron_ext::refuse_gradients(library, {"probe_mmad", "probe_vector", "probe_flags", "probe_sync"});
}
MEGATRON_EXT_IMPLEMENT(megatron_ext::implement)
