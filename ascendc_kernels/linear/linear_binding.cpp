// torch.ops.megatron_ext: linear, dgrad, their fp32 forms, wgrad_ and wgrad.
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include "differentiable.h"
#include "linear_operands.h"

namespace megatron_ext {
namespace {

// name [..., a dimension of weight]: its rows are multiplied with weight [N, K] over dimension `contracted`.
void check(const char* op, const char* name, const at::Tensor& x, const at::Tensor& weight, int64_t contracted) {
    check_model_dtype(op, name, x);
    check_operand(op, "weight", weight, x.scalar_type(), x.device());
    TORCH_CHECK_VALUE(x.dim() >= 1 && weight.dim() == 2 && x.sym_size(-1) == weight.sym_size(contracted), op, ": ", name, " has shape ", x.sym_sizes(),
                      ", weight has shape ", weight.sym_sizes(), ": the last dimension of ", name, " must be dimension ", contracted, " of weight");
}

std::vector<int64_t> sizes_of_result(const at::Tensor& x, int64_t last) {
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = last;
    return sizes;
}

// The kernel on a [m][k] and b with `tiling` filled in but for strides and tiles.
at::Tensor contract(const at::Tensor& a, const at::Tensor& b, LinearTiling tiling, at::ScalarType out_dtype, std::vector<int64_t> sizes, int64_t mmad_order) {
    static const ModelDtypeKernels rounded("linear"), wide("linear_fp32");
    at::Tensor out = at::empty(sizes, a.options().dtype(out_dtype));
    if (out.numel() == 0) return out;
    tiling.m = a.size(0);
    tiling.a_stride = row_stride(a);
    tiling.b_stride = row_stride(b);
    tiling.tile_m = tile_of(tiling.m);
    tiling.tile_n = tile_of(tiling.n);
    const int64_t tiles = cuts(tiling.m, tiling.tile_m) * cuts(tiling.n, tiling.tile_n);
    const int64_t blocks = cube_blocks(a.device(), tiles, tiling.m * tiling.n * tiling.k);
    const at::Tensor workspace = at::empty({blocks * 2 * tiling.pieces * tiling.tile_m * tiling.tile_n}, a.options().dtype(at::kFloat));
    const ModelDtypeKernels& kernels = out_dtype == at::kFloat ? wide : rounded;
    kernels[a.scalar_type()].run(a.device(), {data(a), data(b), mutable_data(out), mutable_data(workspace)}, &tiling, blocks, Path::kNative, mmad_order);
    return out;
}

at::Tensor linear_to(const char* op, at::ScalarType out, const at::Tensor& x, const at::Tensor& weight, int64_t segments, int64_t mmad_order) {
    check(op, "x", x, weight, 1);
    check_pieces_of_k(op, weight.size(1), segments);
    const LinearTiling tiling = tiling_of_linear(weight.size(0), weight.size(1), segments);
    return contract(rows(x), rows(weight), tiling, out, sizes_of_result(x, tiling.n), mmad_order);
}

at::Tensor dgrad_to(const char* op, at::ScalarType out, const at::Tensor& dy, const at::Tensor& weight, int64_t segments, bool gated, int64_t mmad_order) {
    check(op, "dy", dy, weight, 0);
    const int64_t n = weight.size(0);
    check_pieces_of_n(op, n, segments, gated);
    LinearTiling tiling = tiling_of_dgrad(n, weight.size(1), segments, gated);
    at::Tensor a = rows(dy), b = rows(weight);
    if (const at::Tensor order = order_of_ragged_pieces(tiling, dy.device()); order.defined()) {
        a = a.index_select(1, order);
        b = b.index_select(0, order);
    }
    return contract(a, b, tiling, out, sizes_of_result(dy, tiling.n), mmad_order);
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, int64_t segments, int64_t mmad_order) {
    return linear_to("linear", x.scalar_type(), x, weight, segments, mmad_order);
}
at::Tensor linear_fp32(const at::Tensor& x, const at::Tensor& weight, int64_t segments, int64_t mmad_order) {
    return linear_to("linear_fp32", at::kFloat, x, weight, segments, mmad_order);
}
at::Tensor dgrad(const at::Tensor& dy, const at::Tensor& weight, int64_t segments, bool gated, int64_t mmad_order) {
    return dgrad_to("dgrad", dy.scalar_type(), dy, weight, segments, gated, mmad_order);
}
at::Tensor dgrad_fp32(const at::Tensor& dy, const at::Tensor& weight, int64_t segments, bool gated, int64_t mmad_order) {
    return dgrad_to("dgrad_fp32", at::kFloat, dy, weight, segments, gated, mmad_order);
}

// ---- weight gradient

void check_rows_of_both(const char* op, const at::Tensor& dy, const at::Tensor& x) {
    check_model_dtype(op, "dy", dy);
    check_operand(op, "x", x, dy.scalar_type(), dy.device());
    TORCH_CHECK_VALUE(dy.dim() >= 1 && dy.dim() == x.dim() && dy.sym_sizes().slice(0, dy.dim() - 1) == x.sym_sizes().slice(0, x.dim() - 1), op,
                      ": dy has shape ", dy.sym_sizes(), ", x has shape ", x.sym_sizes(), ": they must have the same rows");
}

void check_boundaries(at::IntArrayRef boundaries, int64_t rows) {
    bool ascending = !boundaries.empty() && boundaries.front() == 0 && boundaries.back() == rows;
    for (size_t i = 1; i < boundaries.size(); ++i) ascending = ascending && boundaries[i - 1] <= boundaries[i];
    TORCH_CHECK_VALUE(ascending, "wgrad_: boundaries must ascend from 0 to the number of rows, ", rows, ", found ", boundaries);
}

void wgrad_(const at::Tensor& main_grad, const at::Tensor& dy, const at::Tensor& x, at::IntArrayRef boundaries, int64_t mmad_order) {
    static const ModelDtypeKernels kernels("linear_wgrad");
    check_rows_of_both("wgrad_", dy, x);
    check_accumulator("wgrad_", "main_grad", main_grad, dy.device());
    const int64_t n = dy.size(-1), k = x.size(-1), m = dy.numel() / std::max<int64_t>(n, 1);
    TORCH_CHECK_VALUE(main_grad.dim() == 2 && main_grad.size(0) == n && main_grad.size(1) == k, "wgrad_: main_grad has shape ", main_grad.sizes(),
                      ", dy and x give [", n, ", ", k, "]");
    check_boundaries(boundaries, n ? m : x.numel() / std::max<int64_t>(k, 1));
    if (m == 0 || n == 0 || k == 0) return;
    const at::Tensor dy_rows = rows(dy), x_rows = rows(x);
    LinearWgradTiling tiling{n, k, row_stride(dy_rows), row_stride(x_rows), int64_t(boundaries.size()) - 1, 0, 0};
    tiling.tile_n = tile_of(n);
    tiling.tile_k = tile_of(k);
    const int64_t size = tiling.tile_n * tiling.tile_k, tiles = cuts(n, tiling.tile_n) * cuts(k, tiling.tile_k);
    const int64_t blocks = cube_blocks(dy.device(), tiles, m * n * k);
    const at::Tensor starts = at::tensor(boundaries, at::kLong).to(dy.device());
    const at::Tensor workspace = at::empty({blocks * linear_wgrad_workspace(size)}, dy.options().dtype(at::kByte));
    kernels[dy.scalar_type()].run(dy.device(), {mutable_data(main_grad), data(dy_rows), data(x_rows), data(starts), mutable_data(workspace)}, &tiling, blocks,
                                  Path::kNative, mmad_order);
}

// From a zero accumulator, the rows being one sequence; rounded to the model dtype.
at::Tensor wgrad(const at::Tensor& dy, const at::Tensor& x, int64_t mmad_order) {
    check_rows_of_both("wgrad", dy, x);
    const at::Tensor grad = at::zeros({dy.size(-1), x.size(-1)}, x.options().dtype(at::kFloat));
    const int64_t boundaries[] = {0, x.numel() / std::max<int64_t>(x.size(-1), 1)};
    wgrad_(grad, dy, x, boundaries, mmad_order);
    return grad.to(x.scalar_type());
}

// ---- shapes

at::Tensor linear_meta(const at::Tensor& x, const at::Tensor& weight, int64_t, int64_t) {
    check("linear", "x", x, weight, 1);
    return result_like(x, weight.sym_size(0), x.scalar_type());
}
at::Tensor linear_fp32_meta(const at::Tensor& x, const at::Tensor& weight, int64_t, int64_t) {
    check("linear_fp32", "x", x, weight, 1);
    return result_like(x, weight.sym_size(0), at::kFloat);
}
at::Tensor dgrad_meta(const at::Tensor& dy, const at::Tensor& weight, int64_t, bool, int64_t) {
    check("dgrad", "dy", dy, weight, 0);
    return result_like(dy, weight.sym_size(1), dy.scalar_type());
}
at::Tensor dgrad_fp32_meta(const at::Tensor& dy, const at::Tensor& weight, int64_t, bool, int64_t) {
    check("dgrad_fp32", "dy", dy, weight, 0);
    return result_like(dy, weight.sym_size(1), at::kFloat);
}
void wgrad_meta_(const at::Tensor&, const at::Tensor& dy, const at::Tensor& x, at::IntArrayRef, int64_t) { check_rows_of_both("wgrad_", dy, x); }
at::Tensor wgrad_meta(const at::Tensor& dy, const at::Tensor& x, int64_t) {
    check_rows_of_both("wgrad", dy, x);
    return at::empty_symint({dy.sym_size(-1), x.sym_size(-1)}, x.options());
}

// ---- autograd

using LinearSchema = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, int64_t);
using DgradSchema = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, bool, int64_t);
using WgradSchema = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t);

struct DifferentiableLinear : torch::autograd::Function<DifferentiableLinear> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, int64_t segments,
                              int64_t mmad_order) {
        static const auto op = typed_op<LinearSchema>("linear");
        TORCH_CHECK_VALUE(!x.requires_grad() || weight.sym_size(0) % segments == 0, "linear: the gradient of x is cut into segments as well: N must be a ",
                          "multiple of segments = ", segments, ", found ", weight.sym_size(0), "; for another cut call dgrad and wgrad_");
        at::AutoDispatchBelowADInplaceOrView below;
        context->save_for_backward({x, weight});
        context->saved_data["segments"] = segments;
        context->saved_data["mmad_order"] = mmad_order;
        return op.call(x, weight, segments, mmad_order);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list dy) {
        static const auto dgrad_op = typed_op<DgradSchema>("dgrad");
        static const auto wgrad_op = typed_op<WgradSchema>("wgrad");
        const auto saved = context->get_saved_variables();
        const int64_t segments = context->saved_data["segments"].toInt(), mmad_order = context->saved_data["mmad_order"].toInt();
        at::Tensor dx, dw;
        if (context->needs_input_grad(0)) dx = dgrad_op.call(dy[0], saved[1], segments, false, mmad_order);
        if (context->needs_input_grad(1)) dw = wgrad_op.call(dy[0], saved[0], mmad_order);
        return {dx, dw, at::Tensor(), at::Tensor()};
    }
};

at::Tensor linear_autograd(const at::Tensor& x, const at::Tensor& weight, int64_t segments, int64_t mmad_order) {
    static const auto op = typed_op<LinearSchema>("linear");
    if (needs_gradient(x, weight)) return DifferentiableLinear::apply(x, weight, segments, mmad_order);
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, weight, segments, mmad_order);
}

void implement(torch::Library& library) {
    library.impl("linear", &linear);
    library.impl("linear_fp32", &linear_fp32);
    library.impl("dgrad", &dgrad);
    library.impl("dgrad_fp32", &dgrad_fp32);
    library.impl("wgrad_", &wgrad_);
    library.impl("wgrad", &wgrad);
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_FRAGMENT(megatron_ext, library) {
    library.def("linear(Tensor x, Tensor weight, int segments, int mmad_order) -> Tensor");
    library.def("linear_fp32(Tensor x, Tensor weight, int segments, int mmad_order) -> Tensor");
    library.def("dgrad(Tensor dy, Tensor weight, int segments, bool gated, int mmad_order) -> Tensor");
    library.def("dgrad_fp32(Tensor dy, Tensor weight, int segments, bool gated, int mmad_order) -> Tensor");
    library.def("wgrad_(Tensor(a!) main_grad, Tensor dy, Tensor x, int[] boundaries, int mmad_order) -> ()");
    library.def("wgrad(Tensor dy, Tensor x, int mmad_order) -> Tensor");
}
TORCH_LIBRARY_IMPL(megatron_ext, Meta, library) {
    library.impl("linear", &megatron_ext::linear_meta);
    library.impl("linear_fp32", &megatron_ext::linear_fp32_meta);
    library.impl("dgrad", &megatron_ext::dgrad_meta);
    library.impl("dgrad_fp32", &megatron_ext::dgrad_fp32_meta);
    library.impl("wgrad_", &megatron_ext::wgrad_meta_);
    library.impl("wgrad", &megatron_ext::wgrad_meta);
}
TORCH_LIBRARY_IMPL(megatron_ext, Autograd, library) {
    library.impl("linear", &megatron_ext::linear_autograd);
    megatron_ext::refuse_gradients(library, {"linear_fp32", "dgrad", "dgrad_fp32", "wgrad_", "wgrad"});
}
MEGATRON_EXT_IMPLEMENT(megatron_ext::implement)
