// torch.ops.megatron_ext: masked_softmax and its gradient.
#include <torch/csrc/autograd/custom_function.h>

#include "binding.h"
#include "differentiable.h"
#include "masked_softmax_tiling.h"

namespace megatron_ext {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// The kernels <name>_f32, <name>_bf16 and <name>_f16.
class SoftmaxKernels {
 public:
    explicit SoftmaxKernels(const std::string& name) : f32_(name + "_f32"), rounded_(name) {}
    const Kernel& operator[](at::ScalarType dtype) const { return dtype == at::kFloat ? f32_ : rounded_[dtype]; }

 private:
    Kernel f32_;
    ModelDtypeKernels rounded_;
};

void check_scores(const char* op, const char* name, const at::Tensor& x) {
    TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat || is_model_dtype(x.scalar_type()), op, ": ", name, " must be float32, bfloat16 or float16, found ",
                     x.scalar_type());
    TORCH_CHECK_VALUE(x.dim() >= 2 && x.dim() <= 4, op, ": ", name, " must have 2 to 4 dimensions, the last two queries and keys, found shape ",
                      x.sym_sizes());
}

void check_mask(const at::Tensor& mask, const at::Tensor& x) {
    check_operand("masked_softmax", "mask", mask, at::kBool, x.device());
    bool fits = mask.dim() <= x.dim();
    for (int64_t d = 1; fits && d <= mask.dim(); ++d) fits = mask.sym_size(-d) == 1 || mask.sym_size(-d) == x.sym_size(-d);
    TORCH_CHECK_VALUE(fits, "masked_softmax: mask has shape ", mask.sym_sizes(), ", which cannot be broadcast to x's ", x.sym_sizes());
}

void check(const at::Tensor& x, const OptionalTensor& mask) {
    check_scores("masked_softmax", "x", x);
    if (mask) check_mask(*mask, x);
}

void check_backward(const at::Tensor& dp, const at::Tensor& p) {
    check_scores("masked_softmax_backward", "p", p);
    check_operand("masked_softmax_backward", "dp", dp, p.scalar_type(), p.device());
    TORCH_CHECK_VALUE(dp.sym_sizes() == p.sym_sizes(), "masked_softmax_backward: dp has shape ", dp.sym_sizes(), ", p has shape ", p.sym_sizes());
}

// The mask with the shape of x; keys of a row side by side, everything else broadcast by a stride of 0.
at::Tensor expanded_mask(const at::Tensor& mask, const at::Tensor& x) {
    if (mask.dim() == 0 || mask.size(-1) != x.size(-1) || mask.stride(-1) != 1) {
        std::vector<int64_t> sizes = mask.dim() ? mask.sizes().vec() : std::vector<int64_t>{1};
        sizes.back() = x.size(-1);
        return mask.expand(sizes).contiguous().expand(x.sizes());
    }
    return mask.expand(x.sizes());
}

MaskedSoftmaxTiling tiling_of(const at::Tensor& x, double scale) {
    MaskedSoftmaxTiling tiling{};
    tiling.keys = x.size(-1);
    tiling.rows = x.numel() / tiling.keys;
    tiling.queries = x.size(-2);
    tiling.inner = x.dim() >= 3 ? x.size(-3) : 1;
    tiling.scale = float(scale);
    return tiling;
}

int64_t row_blocks(const at::Tensor& x, const MaskedSoftmaxTiling& tiling) { return vector_blocks(x.device(), tiling.rows, x.numel()); }

at::Tensor masked_softmax(const at::Tensor& x, const OptionalTensor& mask, double scale, bool causal) {
    static const SoftmaxKernels kernels("masked_softmax");
    check(x, mask);
    const at::Tensor y = at::empty(x.sizes(), x.options());
    if (x.numel() == 0) return y;
    const at::Tensor dense = x.contiguous(), full_mask = mask ? expanded_mask(*mask, x) : at::Tensor();
    MaskedSoftmaxTiling tiling = tiling_of(x, scale);
    tiling.causal = causal;
    tiling.masked = mask.has_value();
    if (mask) {
        tiling.query_stride = full_mask.stride(-2);
        tiling.inner_stride = x.dim() >= 3 ? full_mask.stride(-3) : 0;
        tiling.outer_stride = x.dim() >= 4 ? full_mask.stride(-4) : 0;
    }
    kernels[x.scalar_type()].run(x.device(), {data(dense), mask ? data(full_mask) : nullptr, mutable_data(y)}, &tiling, row_blocks(x, tiling),
                                 Path::kNative);
    return y;
}

at::Tensor masked_softmax_backward(const at::Tensor& dp, const at::Tensor& p, double scale) {
    static const SoftmaxKernels kernels("masked_softmax_backward");
    check_backward(dp, p);
    const at::Tensor dx = at::empty(p.sizes(), p.options());
    if (p.numel() == 0) return dx;
    const at::Tensor dense_dp = dp.contiguous(), dense_p = p.contiguous();
    const MaskedSoftmaxTiling tiling = tiling_of(p, scale);
    kernels[p.scalar_type()].run(p.device(), {data(dense_dp), data(dense_p), mutable_data(dx)}, &tiling, row_blocks(p, tiling), Path::kNative);
    return dx;
}

at::Tensor masked_softmax_meta(const at::Tensor& x, const OptionalTensor& mask, double, bool) {
    check(x, mask);
    return at::empty_symint(x.sym_sizes(), x.options());
}

at::Tensor masked_softmax_backward_meta(const at::Tensor& dp, const at::Tensor& p, double) {
    check_backward(dp, p);
    return at::empty_symint(p.sym_sizes(), p.options());
}

using MaskedSoftmaxSchema = at::Tensor(const at::Tensor&, const OptionalTensor&, double, bool);
using MaskedSoftmaxBackwardSchema = at::Tensor(const at::Tensor&, const at::Tensor&, double);

struct DifferentiableMaskedSoftmax : torch::autograd::Function<DifferentiableMaskedSoftmax> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const OptionalTensor& mask, double scale, bool causal) {
        static const auto op = typed_op<MaskedSoftmaxSchema>("masked_softmax");
        at::AutoDispatchBelowADInplaceOrView below;
        const at::Tensor p = op.call(x, mask, scale, causal);
        context->save_for_backward({p});
        context->saved_data["scale"] = scale;
        return p;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list dp) {
        static const auto op = typed_op<MaskedSoftmaxBackwardSchema>("masked_softmax_backward");
        const at::Tensor p = context->get_saved_variables()[0];
        return {op.call(dp[0], p, context->saved_data["scale"].toDouble()), at::Tensor(), at::Tensor(), at::Tensor()};
    }
};

at::Tensor masked_softmax_autograd(const at::Tensor& x, const OptionalTensor& mask, double scale, bool causal) {
    static const auto op = typed_op<MaskedSoftmaxSchema>("masked_softmax");
    if (needs_gradient(x)) return DifferentiableMaskedSoftmax::apply(x, mask, scale, causal);
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, mask, scale, causal);
}

void implement(torch::Library& library) {
    library.impl("masked_softmax", &masked_softmax);
    library.impl("masked_softmax_backward", &masked_softmax_backward);
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_FRAGMENT(megatron_ext, library) {
    library.def("masked_softmax(Tensor x, Tensor? mask, float scale, bool causal=False) -> Tensor");
    library.def("masked_softmax_backward(Tensor dp, Tensor p, float scale) -> Tensor");
}
TORCH_LIBRARY_IMPL(megatron_ext, Meta, library) {
    library.impl("masked_softmax", &megatron_ext::masked_softmax_meta);
    library.impl("masked_softmax_backward", &megatron_ext::masked_softmax_backward_meta);
}
TORCH_LIBRARY_IMPL(megatron_ext, Autograd, library) {
    library.impl("masked_softmax", &megatron_ext::masked_softmax_autograd);
    megatron_ext::refuse_gradients(library, {"masked_softmax_backward"});
}
MEGATRON_EXT_IMPLEMENT(megatron_ext::implement)
