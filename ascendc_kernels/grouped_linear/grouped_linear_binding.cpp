// torch.ops.megatron_ext: grouped_linear, grouped_dgrad, grouped_dgrad_fp32, grouped_wgrad_ and grouped_wgrad. Legend: E experts, R rows of all of them.
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include "../linear/linear_operands.h"
#include "differentiable.h"
#include "grouped_linear_tiling.h"

namespace megatron_ext {
namespace {

void check_counts(const char* op, const at::Tensor& counts, const c10::SymInt& experts, const at::Device& device) {
    check_operand(op, "counts", counts, at::kLong, device);
    TORCH_CHECK_VALUE(counts.dim() == 1 && counts.sym_size(0) == experts, op, ": counts must be [", experts, "], one number of rows for each expert, found ",
                      counts.sym_sizes());
}

// name [R, a dimension of weight]: its rows are multiplied with their expert's matrix of weight [E, N, K] over dimension `contracted`.
void check(const char* op, const char* name, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& counts, int64_t contracted) {
    check_model_dtype(op, name, x);
    check_operand(op, "weight", weight, x.scalar_type(), x.device());
    TORCH_CHECK_VALUE(x.dim() == 2 && weight.dim() == 3 && x.sym_size(1) == weight.sym_size(contracted), op, ": ", name, " has shape ", x.sym_sizes(),
                      ", weight has shape ", weight.sym_sizes(), ": expected [R, ", contracted == 2 ? "K" : "N", "] and [E, N, K]");
    check_counts(op, counts, weight.sym_size(0), x.device());
}

// On a device nobody waits for the counts: its kernel stays inside its operands whatever they are.
void check_sum(const char* op, const at::Tensor& counts, int64_t rows) {
    if (!counts.is_cpu()) return;
    int64_t sum = 0;
    for (const int64_t *count = counts.const_data_ptr<int64_t>(), *end = count + counts.numel(); count != end; ++count) {
        TORCH_CHECK_VALUE(*count >= 0, op, ": counts must not be negative, found ", *count);
        sum += *count;
    }
    TORCH_CHECK_VALUE(sum == rows, op, ": counts sum to ", sum, ", but there are ", rows, " rows");
}

at::Tensor dense_rows_of_matrices(const at::Tensor& weight) {
    return weight.stride(2) == 1 && weight.stride(1) >= weight.size(2) ? weight : weight.contiguous();
}

// The kernel on a [R][k] and b [E] with `t` filled in but for strides and tiles.
at::Tensor contract(const char* op, const at::Tensor& a, const at::Tensor& b, const at::Tensor& counts, LinearTiling t, at::ScalarType out_dtype,
                    int64_t mmad_order) {
    static const ModelDtypeKernels rounded("grouped_linear"), wide("grouped_linear_fp32");
    const at::Tensor own_counts = counts.contiguous(), out = at::empty({a.size(0), t.n}, a.options().dtype(out_dtype));
    check_sum(op, own_counts, a.size(0));
    if (out.numel() == 0) return out;
    t.m = a.size(0);
    t.a_stride = row_stride(a);
    t.b_stride = b.stride(1);
    t.tile_m = tile_of(t.m);
    t.tile_n = tile_of(t.n);
    const GroupedLinearTiling tiling = {t, b.size(0), b.stride(0)};
    const int64_t most_tiles = (t.m / t.tile_m + std::min(t.m, tiling.experts)) * cuts(t.n, t.tile_n);
    const int64_t blocks = cube_blocks(a.device(), most_tiles, t.m * t.n * t.k);
    const at::Tensor workspace = at::empty({blocks * 2 * t.pieces * t.tile_m * t.tile_n}, a.options().dtype(at::kFloat));
    const ModelDtypeKernels& kernels = out_dtype == at::kFloat ? wide : rounded;
    kernels[a.scalar_type()].run(a.device(), {data(a), data(b), data(own_counts), mutable_data(out), mutable_data(workspace)}, &tiling, blocks,
                                 Path::kNative, mmad_order);
    return out;
}

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& counts, int64_t segments, int64_t mmad_order) {
    check("grouped_linear", "x", x, weight, counts, 2);
    check_pieces_of_k("grouped_linear", weight.size(2), segments);
    const LinearTiling tiling = tiling_of_linear(weight.size(1), weight.size(2), segments);
    return contract("grouped_linear", rows(x), dense_rows_of_matrices(weight), counts, tiling, x.scalar_type(), mmad_order);
}

at::Tensor dgrad_to(const char* op, at::ScalarType out, const at::Tensor& dy, const at::Tensor& weight, const at::Tensor& counts, int64_t segments,
                    bool gated, int64_t mmad_order) {
    check(op, "dy", dy, weight, counts, 1);
    check_pieces_of_n(op, weight.size(1), segments, gated);
    LinearTiling tiling = tiling_of_dgrad(weight.size(1), weight.size(2), segments, gated);
    at::Tensor a = rows(dy), b = dense_rows_of_matrices(weight);
    if (const at::Tensor order = order_of_ragged_pieces(tiling, dy.device()); order.defined()) {
        a = a.index_select(1, order);
        b = b.index_select(1, order);
    }
    return contract(op, a, b, counts, tiling, out, mmad_order);
}

at::Tensor grouped_dgrad(const at::Tensor& dy, const at::Tensor& weight, const at::Tensor& counts, int64_t segments, bool gated, int64_t mmad_order) {
    return dgrad_to("grouped_dgrad", dy.scalar_type(), dy, weight, counts, segments, gated, mmad_order);
}
at::Tensor grouped_dgrad_fp32(const at::Tensor& dy, const at::Tensor& weight, const at::Tensor& counts, int64_t segments, bool gated,
                              int64_t mmad_order) {
    return dgrad_to("grouped_dgrad_fp32", at::kFloat, dy, weight, counts, segments, gated, mmad_order);
}

// ---- weight gradient

void check_rows_of_both(const char* op, const at::Tensor& dy, const at::Tensor& x) {
    check_model_dtype(op, "dy", dy);
    check_operand(op, "x", x, dy.scalar_type(), dy.device());
    TORCH_CHECK_VALUE(dy.dim() == 2 && x.dim() == 2 && dy.sym_size(0) == x.sym_size(0), op, ": dy has shape ", dy.sym_sizes(), ", x has shape ",
                      x.sym_sizes(), ": expected [R, N] and [R, K]");
}

void check_gradients(at::TensorList main_grads, const at::Tensor& dy, const at::Tensor& x) {
    for (const at::Tensor& grad : main_grads) {
        check_accumulator("grouped_wgrad_", "main_grads", grad, dy.device());
        TORCH_CHECK_VALUE(grad.dim() == 2 && grad.size(0) == dy.size(1) && grad.size(1) == x.size(1), "grouped_wgrad_: a main_grad has shape ", grad.sizes(),
                          ", dy and x give [", dy.size(1), ", ", x.size(1), "]");
    }
}

// Ascending from 0 to the number of rows, with a boundary where each expert's rows begin. On a device nobody waits for them.
void check_boundaries(const at::Tensor& boundaries, const at::Tensor& counts, int64_t rows) {
    if (!boundaries.is_cpu()) return;
    const int64_t *begin = boundaries.const_data_ptr<int64_t>(), *end = begin + boundaries.numel(), *at = begin;
    TORCH_CHECK_VALUE(begin != end && *begin == 0 && end[-1] == rows && std::is_sorted(begin, end),
                      "grouped_wgrad_: boundaries must ascend from 0 to the number of rows, ", rows, ", found ", boundaries);
    int64_t first = 0;
    for (int64_t expert = 0; expert < counts.numel(); first += counts.const_data_ptr<int64_t>()[expert++]) {
        at = std::lower_bound(at, end, first);
        TORCH_CHECK_VALUE(at != end && *at == first, "grouped_wgrad_: the rows of expert ", expert, " begin at ", first, ", which is not among the boundaries ",
                          boundaries);
    }
}

at::Tensor addresses_of(at::TensorList tensors, const at::Device& device) {
    std::vector<int64_t> addresses;
    for (const at::Tensor& tensor : tensors) addresses.push_back(reinterpret_cast<int64_t>(mutable_data(tensor)));
    return at::tensor(addresses, at::kLong).to(device);
}

void grouped_wgrad_(at::TensorList main_grads, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& counts, const at::Tensor& boundaries,
                    int64_t mmad_order) {
    static const ModelDtypeKernels kernels("grouped_linear_wgrad");
    const int64_t experts = int64_t(main_grads.size());
    check_rows_of_both("grouped_wgrad_", dy, x);
    check_counts("grouped_wgrad_", counts, experts, dy.device());
    check_operand("grouped_wgrad_", "boundaries", boundaries, at::kLong, dy.device());
    check_gradients(main_grads, dy, x);
    const at::Tensor own_counts = counts.contiguous(), own_boundaries = boundaries.contiguous(), dy_rows = rows(dy), x_rows = rows(x);
    check_sum("grouped_wgrad_", own_counts, dy.size(0));
    check_boundaries(own_boundaries, own_counts, dy.size(0));
    if (dy.numel() == 0 || x.numel() == 0) return;
    LinearWgradTiling t{dy.size(1), x.size(1), row_stride(dy_rows), row_stride(x_rows), boundaries.numel() - 1, tile_of(dy.size(1)), tile_of(x.size(1))};
    const GroupedLinearWgradTiling tiling = {t, experts, dy.size(0)};
    const int64_t most_tiles = std::min(experts, dy.size(0)) * cuts(t.n, t.tile_n) * cuts(t.k, t.tile_k);
    const int64_t blocks = cube_blocks(dy.device(), most_tiles, dy.size(0) * t.n * t.k);
    const at::Tensor addresses = addresses_of(main_grads, dy.device());
    const at::Tensor workspace = at::empty({blocks * linear_wgrad_workspace(t.tile_n * t.tile_k)}, dy.options().dtype(at::kByte));
    kernels[dy.scalar_type()].run(
        dy.device(), {data(addresses), data(dy_rows), data(x_rows), data(own_counts), data(own_boundaries), mutable_data(workspace)}, &tiling, blocks,
        Path::kNative, mmad_order);
}

// From zero accumulators, the rows of an expert being one sequence; rounded to the model dtype.
at::Tensor grouped_wgrad(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& counts, int64_t mmad_order) {
    check_rows_of_both("grouped_wgrad", dy, x);
    check_counts("grouped_wgrad", counts, counts.sym_size(0), dy.device());
    const at::Tensor grads = at::zeros({counts.size(0), dy.size(1), x.size(1)}, x.options().dtype(at::kFloat));
    const at::Tensor boundaries = at::cat({at::zeros({1}, counts.options()), counts.cumsum(0)});
    grouped_wgrad_(grads.unbind(0), dy, x, counts, boundaries, mmad_order);
    return grads.to(x.scalar_type());
}

// ---- shapes

at::Tensor grouped_linear_meta(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& counts, int64_t, int64_t) {
    check("grouped_linear", "x", x, weight, counts, 2);
    return result_like(x, weight.sym_size(1), x.scalar_type());
}
at::Tensor grouped_dgrad_meta(const at::Tensor& dy, const at::Tensor& weight, const at::Tensor& counts, int64_t, bool, int64_t) {
    check("grouped_dgrad", "dy", dy, weight, counts, 1);
    return result_like(dy, weight.sym_size(2), dy.scalar_type());
}
at::Tensor grouped_dgrad_fp32_meta(const at::Tensor& dy, const at::Tensor& weight, const at::Tensor& counts, int64_t, bool, int64_t) {
    check("grouped_dgrad_fp32", "dy", dy, weight, counts, 1);
    return result_like(dy, weight.sym_size(2), at::kFloat);
}
void grouped_wgrad_meta_(at::TensorList, const at::Tensor& dy, const at::Tensor& x, const at::Tensor&, const at::Tensor&, int64_t) {
    check_rows_of_both("grouped_wgrad_", dy, x);
}
at::Tensor grouped_wgrad_meta(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& counts, int64_t) {
    check_rows_of_both("grouped_wgrad", dy, x);
    return at::empty_symint({counts.sym_size(0), dy.sym_size(1), x.sym_size(1)}, x.options());
}

// ---- autograd

using GroupedLinearSchema = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, int64_t);
using GroupedDgradSchema = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, bool, int64_t);
using GroupedWgradSchema = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t);

struct DifferentiableGroupedLinear : torch::autograd::Function<DifferentiableGroupedLinear> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& counts,
                              int64_t segments, int64_t mmad_order) {
        static const auto op = typed_op<GroupedLinearSchema>("grouped_linear");
        TORCH_CHECK_VALUE(!x.requires_grad() || weight.sym_size(1) % segments == 0, "grouped_linear: the gradient of x is cut into segments as well: N must ",
                          "be a multiple of segments = ", segments, ", found ", weight.sym_size(1), "; for another cut call grouped_dgrad and grouped_wgrad_");
        at::AutoDispatchBelowADInplaceOrView below;
        context->save_for_backward({x, weight, counts});
        context->saved_data["segments"] = segments;
        context->saved_data["mmad_order"] = mmad_order;
        return op.call(x, weight, counts, segments, mmad_order);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list dy) {
        static const auto dgrad_op = typed_op<GroupedDgradSchema>("grouped_dgrad");
        static const auto wgrad_op = typed_op<GroupedWgradSchema>("grouped_wgrad");
        const auto saved = context->get_saved_variables();
        const int64_t segments = context->saved_data["segments"].toInt(), mmad_order = context->saved_data["mmad_order"].toInt();
        at::Tensor dx, dw;
        if (context->needs_input_grad(0)) dx = dgrad_op.call(dy[0], saved[1], saved[2], segments, false, mmad_order);
        if (context->needs_input_grad(1)) dw = wgrad_op.call(dy[0], saved[0], saved[2], mmad_order);
        return {dx, dw, at::Tensor(), at::Tensor(), at::Tensor()};
    }
};

at::Tensor grouped_linear_autograd(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& counts, int64_t segments, int64_t mmad_order) {
    static const auto op = typed_op<GroupedLinearSchema>("grouped_linear");
    if (needs_gradient(x, weight)) return DifferentiableGroupedLinear::apply(x, weight, counts, segments, mmad_order);
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, weight, counts, segments, mmad_order);
}

void implement(torch::Library& library) {
    library.impl("grouped_linear", &grouped_linear);
    library.impl("grouped_dgrad", &grouped_dgrad);
    library.impl("grouped_dgrad_fp32", &grouped_dgrad_fp32);
    library.impl("grouped_wgrad_", &grouped_wgrad_);
    library.impl("grouped_wgrad", &grouped_wgrad);
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_FRAGMENT(megatron_ext, library) {
    library.def("grouped_linear(Tensor x, Tensor weight, Tensor counts, int segments, int mmad_order) -> Tensor");
    library.def("grouped_dgrad(Tensor dy, Tensor weight, Tensor counts, int segments, bool gated, int mmad_order) -> Tensor");
    library.def("grouped_dgrad_fp32(Tensor dy, Tensor weight, Tensor counts, int segments, bool gated, int mmad_order) -> Tensor");
    library.def("grouped_wgrad_(Tensor(a!)[] main_grads, Tensor dy, Tensor x, Tensor counts, Tensor boundaries, int mmad_order) -> ()");
    library.def("grouped_wgrad(Tensor dy, Tensor x, Tensor counts, int mmad_order) -> Tensor");
}
TORCH_LIBRARY_IMPL(megatron_ext, Meta, library) {
    library.impl("grouped_linear", &megatron_ext::grouped_linear_meta);
    library.impl("grouped_dgrad", &megatron_ext::grouped_dgrad_meta);
    library.impl("grouped_dgrad_fp32", &megatron_ext::grouped_dgrad_fp32_meta);
    library.impl("grouped_wgrad_", &megatron_ext::grouped_wgrad_meta_);
    library.impl("grouped_wgrad", &megatron_ext::grouped_wgrad_meta);
}
TORCH_LIBRARY_IMPL(megatron_ext, Autograd, library) {
    library.impl("grouped_linear", &megatron_ext::grouped_linear_autograd);
    megatron_ext::refuse_gradients(library, {"grouped_dgrad", "grouped_dgrad_fp32", "grouped_wgrad_", "grouped_wgrad"});
}
MEGATRON_EXT_IMPLEMENT(megatron_ext::implement)
