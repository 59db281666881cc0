// torch.ops.megatron_ext: rms_norm, add_rms_norm, qk_norm and the gradients.
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include "binding.h"
#include "differentiable.h"
#include "rms_norm_tiling.h"

namespace megatron_ext {
namespace {

// The rows of x [..., H]: dense, or equally spaced inside an equally spaced outer index; anything else is copied.
at::Tensor regular_rows(const at::Tensor& x) {
    if (x.is_contiguous()) return x;
    const int64_t last = x.dim() - 1;
    bool regular = last >= 1 && x.stride(last) == 1 && x.stride(last - 1) >= x.size(last);
    for (int64_t d = 0; d + 3 <= last; ++d) regular = regular && x.stride(d) == x.stride(d + 1) * x.size(d + 1);
    for (int64_t d = 0; d < last; ++d) regular = regular && x.stride(d) > 0;
    return regular ? x : x.contiguous();
}

RmsNormTiling tiling_of(const at::Tensor& x, double eps) {
    RmsNormTiling tiling{};
    const int64_t last = x.dim() - 1;
    tiling.hidden = x.size(last);
    tiling.rows = x.numel() / tiling.hidden;
    tiling.inner = x.is_contiguous() ? tiling.rows : x.size(last - 1);
    tiling.inner_stride = x.is_contiguous() ? tiling.hidden : x.stride(last - 1);
    tiling.outer_stride = x.is_contiguous() || last < 2 ? 0 : x.stride(last - 2);
    tiling.tile_rows = std::clamp<int64_t>(kRmsNormTileElements / tiling.hidden, 1, kRmsNormMaxTileRows);
    tiling.tile_columns = std::min<int64_t>(kRmsNormMaxTileColumns, (tiling.hidden + 63) / 64 * 64);
    tiling.eps = float(eps);
    return tiling;
}

void check(const char* op, const at::Tensor& x, const at::Tensor& weight) {
    check_model_dtype(op, "x", x);
    check_operand(op, "weight", weight, x.scalar_type(), x.device());
    TORCH_CHECK_VALUE(x.dim() >= 1 && weight.dim() == 1 && x.sym_size(-1) == weight.sym_size(0), op, ": x has shape ", x.sym_sizes(), ", weight has shape ",
                      weight.sym_sizes());
}

void check_same_shape(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& x) {
    check_operand(op, name, tensor, x.scalar_type(), x.device());
    TORCH_CHECK_VALUE(tensor.sym_sizes() == x.sym_sizes(), op, ": ", name, " has shape ", tensor.sym_sizes(), ", x has shape ", x.sym_sizes());
}

void check_width(const char* op, int64_t hidden) {
    TORCH_CHECK_VALUE(hidden >= 1 && hidden <= kRmsNormMaxHidden, op, ": the last dimension must be 1 to ", kRmsNormMaxHidden, ", found ", hidden,
                      " (a row has to fit into the vector core's memory)");
}

int64_t row_blocks(const at::Device& device, const RmsNormTiling& tiling) {
    return vector_blocks(device, (tiling.rows + tiling.tile_rows - 1) / tiling.tile_rows, tiling.rows * tiling.hidden);
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
    static const ModelDtypeKernels kernels("rms_norm");
    check("rms_norm", x, weight);
    at::Tensor y = at::empty(x.sizes(), x.options());
    if (x.numel() == 0) return y;
    check_width("rms_norm", x.size(-1));
    const at::Tensor rows = regular_rows(x), dense_weight = weight.contiguous();
    const RmsNormTiling tiling = tiling_of(rows, eps);
    kernels[x.scalar_type()].run(x.device(), {data(rows), data(dense_weight), mutable_data(y)}, &tiling, row_blocks(x.device(), tiling),
                                 Path::kNative);
    return y;
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps) {
    static const ModelDtypeKernels kernels("add_rms_norm");
    check("add_rms_norm", x, weight);
    check_same_shape("add_rms_norm", "residual", residual, x);
    at::Tensor y = at::empty(x.sizes(), x.options()), sum = at::empty(x.sizes(), x.options());
    if (x.numel() == 0) return {y, sum};
    check_width("add_rms_norm", x.size(-1));
    const at::Tensor rows = regular_rows(x), dense_residual = residual.contiguous(), dense_weight = weight.contiguous();
    const RmsNormTiling tiling = tiling_of(rows, eps);
    kernels[x.scalar_type()].run(x.device(), {data(rows), data(dense_residual), data(dense_weight), mutable_data(y), mutable_data(sum)}, &tiling,
                                 row_blocks(x.device(), tiling), Path::kNative);
    return {y, sum};
}

// dx; adds the weight gradient into dw.
at::Tensor rms_norm_backward_(const at::Tensor& dw, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, double eps) {
    static const ModelDtypeKernels dx_kernels("rms_norm_dx"), dw_kernels("rms_norm_dw");
    check("rms_norm_backward_", x, weight);
    check_same_shape("rms_norm_backward_", "dy", dy, x);
    check_accumulator("rms_norm_backward_", "dw", dw, x.device());
    TORCH_CHECK_VALUE(dw.sizes() == weight.sizes(), "rms_norm_backward_: dw has shape ", dw.sizes(), ", weight has shape ", weight.sizes());
    at::Tensor dx = at::empty(x.sizes(), x.options());
    if (x.numel() == 0) return dx;
    check_width("rms_norm_backward_", x.size(-1));
    const at::Tensor rows = regular_rows(x), dense_dy = dy.contiguous(), dense_weight = weight.contiguous();
    const RmsNormTiling tiling = tiling_of(rows, eps);
    const at::Tensor rstd = at::empty({tiling.rows}, x.options().dtype(at::kFloat));
    dx_kernels[x.scalar_type()].run(x.device(), {data(dense_dy), data(rows), data(dense_weight), mutable_data(dx), mutable_data(rstd)}, &tiling,
                                    row_blocks(x.device(), tiling), Path::kNative);
    const int64_t column_tiles = (tiling.hidden + tiling.tile_columns - 1) / tiling.tile_columns;
    dw_kernels[x.scalar_type()].run(x.device(), {data(dense_dy), data(rows), data(rstd), mutable_data(dw)}, &tiling,
                                    vector_blocks(x.device(), column_tiles, x.numel()), Path::kNative);
    return dx;
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, double eps) {
    const at::Tensor dw = at::zeros(weight.sizes(), weight.options().dtype(at::kFloat));
    const at::Tensor dx = rms_norm_backward_(dw, dy, x, weight, eps);
    return {dx, dw.to(weight.scalar_type())};
}

at::Tensor rms_norm_meta(const at::Tensor& x, const at::Tensor& weight, double) {
    check("rms_norm", x, weight);
    return at::empty_symint(x.sym_sizes(), x.options());
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm_meta(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double) {
    check("add_rms_norm", x, weight);
    check_same_shape("add_rms_norm", "residual", residual, x);
    return {at::empty_symint(x.sym_sizes(), x.options()), at::empty_symint(x.sym_sizes(), x.options())};
}

at::Tensor rms_norm_backward_meta_(const at::Tensor&, const at::Tensor&, const at::Tensor& x, const at::Tensor&, double) {
    return at::empty_symint(x.sym_sizes(), x.options());
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward_meta(const at::Tensor&, const at::Tensor& x, const at::Tensor& weight, double) {
    return {at::empty_symint(x.sym_sizes(), x.options()), at::empty_symint(weight.sym_sizes(), weight.options())};
}

using RmsNormSchema = at::Tensor(const at::Tensor&, const at::Tensor&, double);
using RmsNormBackwardSchema = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&, double);

struct DifferentiableRmsNorm : torch::autograd::Function<DifferentiableRmsNorm> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, double eps) {
        static const auto op = typed_op<RmsNormSchema>("rms_norm");
        at::AutoDispatchBelowADInplaceOrView below;
        context->save_for_backward({x, weight});
        context->saved_data["eps"] = eps;
        return op.call(x, weight, eps);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list dy) {
        static const auto op = typed_op<RmsNormBackwardSchema>("rms_norm_backward");
        const auto saved = context->get_saved_variables();
        auto [dx, dw] = op.call(dy[0], saved[0], saved[1], context->saved_data["eps"].toDouble());
        return {dx, dw, at::Tensor()};
    }
};

at::Tensor rms_norm_autograd(const at::Tensor& x, const at::Tensor& weight, double eps) {
    static const auto op = typed_op<RmsNormSchema>("rms_norm");
    if (needs_gradient(x, weight)) return DifferentiableRmsNorm::apply(x, weight, eps);
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, weight, eps);
}

// Heads of a packed QKV are read where they are. Both halves are differentiable through rms_norm.
std::tuple<at::Tensor, at::Tensor> qk_norm(const at::Tensor& q, const at::Tensor& k, const at::Tensor& q_weight, const at::Tensor& k_weight,
                                           double eps) {
    static const auto op = typed_op<RmsNormSchema>("rms_norm");
    return {op.call(q, q_weight, eps), op.call(k, k_weight, eps)};
}

void implement(torch::Library& library) {
    library.impl("rms_norm", &rms_norm);
    library.impl("add_rms_norm", &add_rms_norm);
    library.impl("rms_norm_backward_", &rms_norm_backward_);
    library.impl("rms_norm_backward", &rms_norm_backward);
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_FRAGMENT(megatron_ext, library) {
    library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
    library.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
    library.def("qk_norm(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps) -> (Tensor, Tensor)");
    library.def("rms_norm_backward(Tensor dy, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)");
    library.def("rms_norm_backward_(Tensor(a!) dw, Tensor dy, Tensor x, Tensor weight, float eps) -> Tensor");
}
TORCH_LIBRARY_IMPL(megatron_ext, Meta, library) {
    library.impl("rms_norm", &megatron_ext::rms_norm_meta);
    library.impl("add_rms_norm", &megatron_ext::add_rms_norm_meta);
    library.impl("rms_norm_backward_", &megatron_ext::rms_norm_backward_meta_);
    library.impl("rms_norm_backward", &megatron_ext::rms_norm_backward_meta);
}
TORCH_LIBRARY_IMPL(megatron_ext, Autograd, library) {
    library.impl("rms_norm", &megatron_ext::rms_norm_autograd);
    megatron_ext::refuse_gradients(library, {"add_rms_norm", "rms_norm_backward", "rms_norm_backward_"});
}
TORCH_LIBRARY_IMPL(megatron_ext, CompositeImplicitAutograd, library) { library.impl("qk_norm", &megatron_ext::qk_norm); }
MEGATRON_EXT_IMPLEMENT(megatron_ext::implement)
