// torch.ops.megatron_ext: exp, log, row_sum.
#include "binding.h"
#include "differentiable.h"
#include "elementary_tiling.h"

namespace megatron_ext {
namespace {

at::Tensor elementwise(const char* op, const Kernel& kernel, const at::Tensor& x) {
    check_same_dtype(op, "x", x, at::kFloat);
    at::Tensor y = at::empty(x.sizes(), x.options());
    if (x.numel() == 0) return y;
    const at::Tensor dense = x.contiguous();
    const int64_t size = x.numel(), tile = std::min(kElementwiseMaxTile, (size + 63) / 64 * 64);
    const ElementwiseTiling tiling = {size, tile};
    kernel.run(x.device(), {data(dense), mutable_data(y)}, &tiling, vector_blocks(x.device(), (size + tile - 1) / tile, size), Path::kNative);
    return y;
}

at::Tensor exp(const at::Tensor& x) {
    static const Kernel kernel("exp_f32");
    return elementwise("exp", kernel, x);
}

at::Tensor log(const at::Tensor& x) {
    static const Kernel kernel("log_f32");
    return elementwise("log", kernel, x);
}

void check_rows(const at::Tensor& x) {
    check_same_dtype("row_sum", "x", x, at::kFloat);
    TORCH_CHECK_VALUE(x.dim() >= 1, "row_sum: x must be [..., n], found a scalar");
}

at::Tensor row_sum(const at::Tensor& x) {
    static const Kernel kernel("row_sum_f32");
    check_rows(x);
    at::Tensor sums = at::empty(x.sizes().slice(0, x.dim() - 1), x.options());
    if (x.numel() == 0) return sums.zero_();
    const at::Tensor dense = x.contiguous();
    const int64_t width = x.size(-1), columns = std::min(kRowSumTileElements, (width + 63) / 64 * 64);
    const RowSumTiling tiling = {sums.numel(), width, std::min(kRowSumTileElements / columns, kRowSumMaxTileRows), columns};
    kernel.run(x.device(), {data(dense), mutable_data(sums)}, &tiling,
               vector_blocks(x.device(), (tiling.rows + tiling.tile_rows - 1) / tiling.tile_rows, x.numel()), Path::kNative);
    return sums;
}

at::Tensor elementwise_meta(const char* op, const at::Tensor& x) {
    check_same_dtype(op, "x", x, at::kFloat);
    return at::empty_symint(x.sym_sizes(), x.options());
}

at::Tensor exp_meta(const at::Tensor& x) { return elementwise_meta("exp", x); }
at::Tensor log_meta(const at::Tensor& x) { return elementwise_meta("log", x); }

at::Tensor row_sum_meta(const at::Tensor& x) {
    check_rows(x);
    return at::empty_symint(x.sym_sizes().slice(0, x.dim() - 1), x.options());
}

// Raises at the call, not in the backward pass: the boxed fallback of `refuse_gradients` costs as much as a small call itself.
at::Tensor without_gradient(const char* name, const c10::TypedOperatorHandle<at::Tensor(const at::Tensor&)>& op, const at::Tensor& x) {
    TORCH_CHECK_NOT_IMPLEMENTED(!needs_gradient(x), name, ": the gradient is not implemented; call it on a detached tensor");
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x);
}

at::Tensor exp_autograd(const at::Tensor& x) {
    static const auto op = typed_op<at::Tensor(const at::Tensor&)>("exp");
    return without_gradient("exp", op, x);
}

at::Tensor log_autograd(const at::Tensor& x) {
    static const auto op = typed_op<at::Tensor(const at::Tensor&)>("log");
    return without_gradient("log", op, x);
}

at::Tensor row_sum_autograd(const at::Tensor& x) {
    static const auto op = typed_op<at::Tensor(const at::Tensor&)>("row_sum");
    return without_gradient("row_sum", op, x);
}

void implement(torch::Library& library) {
    library.impl("exp", &megatron_ext::exp);
    library.impl("log", &megatron_ext::log);
    library.impl("row_sum", &row_sum);
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_FRAGMENT(megatron_ext, library) {
    library.def("exp(Tensor x) -> Tensor");
    library.def("log(Tensor x) -> Tensor");
    library.def("row_sum(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(megatron_ext, Meta, library) {
    library.impl("exp", &megatron_ext::exp_meta);
    library.impl("log", &megatron_ext::log_meta);
    library.impl("row_sum", &megatron_ext::row_sum_meta);
}
TORCH_LIBRARY_IMPL(megatron_ext, Autograd, library) {
    library.impl("exp", &megatron_ext::exp_autograd);
    library.impl("log", &megatron_ext::log_autograd);
    library.impl("row_sum", &megatron_ext::row_sum_autograd);
}
MEGATRON_EXT_IMPLEMENT(megatron_ext::implement)
