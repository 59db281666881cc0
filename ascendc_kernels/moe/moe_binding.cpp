// torch.ops.megatron_ext: permute, unpermute, combine, combine_rows and combine_backward. Legend: T tokens, R rows (token copies), H hidden, E experts.
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/searchsorted.h>
#include <torch/csrc/autograd/custom_function.h>

#include "../embedding/embedding_tiling.h"
#include "binding.h"
#include "differentiable.h"
#include "moe_tiling.h"

namespace megatron_ext {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

void check_ids(const char* op, const char* name, const at::Tensor& ids, const c10::SymInt& rows, const at::Device& device) {
    check_operand(op, name, ids, at::kLong, device);
    TORCH_CHECK_VALUE(ids.dim() == 1 && ids.sym_size(0) == rows, op, ": ", name, " must be [R = ", rows, "], found shape ", ids.sym_sizes());
}

// On a device nobody waits for the ids.
void check_range(const char* op, const char* name, const at::Tensor& ids, int64_t first, int64_t last) {
    if (!ids.is_cpu()) return;
    for (const int64_t *id = ids.const_data_ptr<int64_t>(), *end = id + ids.numel(); id != end; ++id)
        TORCH_CHECK_INDEX(*id >= first && *id < last, op, ": ", name, " must be ", first, " to ", last - 1, ", found ", *id);
}

void check_rows(const char* op, const char* name, const at::Tensor& rows) {
    check_model_dtype(op, name, rows);
    TORCH_CHECK_VALUE(rows.dim() == 2, op, ": ", name, " must be [R, H], found shape ", rows.sym_sizes());
}

// ---- rows to their experts and back

int64_t copy_blocks(const at::Tensor& out) {
    return vector_blocks(out.device(), (out.size(0) + kEmbeddingTokensTogether - 1) / kEmbeddingTokensTogether, out.numel());
}

EmbeddingTiling tiling_of_copy(int64_t rows, int64_t hidden) { return {rows, hidden, std::min((hidden + 63) / 64 * 64, kEmbeddingMaxTileColumns), 1}; }

void check_permute(const at::Tensor& x, const at::Tensor& token_ids, const OptionalTensor& expert_ids) {
    check_rows("permute", "x", x);
    check_ids("permute", "token_ids", token_ids, token_ids.sym_numel(), x.device());
    if (expert_ids) check_ids("permute", "expert_ids", *expert_ids, token_ids.sym_numel(), x.device());
}

// The lookup of ../embedding. The experts are for the gradient.
at::Tensor permute(const at::Tensor& x, const at::Tensor& token_ids, const OptionalTensor& expert_ids, int64_t, int64_t) {
    static const Kernel kernel("embedding_b16");
    check_permute(x, token_ids, expert_ids);
    const at::Tensor rows = at::empty({token_ids.numel(), x.size(1)}, x.options()), dense_x = x.contiguous(), dense_ids = token_ids.contiguous();
    check_range("permute", "token_ids", dense_ids, 0, x.size(0));
    if (rows.numel() == 0) return rows;
    const EmbeddingTiling tiling = tiling_of_copy(rows.size(0), rows.size(1));
    kernel.run(x.device(), {data(dense_ids), data(dense_x), mutable_data(rows)}, &tiling, copy_blocks(rows), Path::kNative);
    return rows;
}

void check_unpermute(const at::Tensor& rows, const at::Tensor& index) {
    check_rows("unpermute", "rows", rows);
    check_ids("unpermute", "index", index, rows.sym_size(0), rows.device());
}

at::Tensor unpermute(const at::Tensor& rows, const at::Tensor& index) {
    static const Kernel kernel("unpermute_b16");
    check_unpermute(rows, index);
    const at::Tensor out = at::empty(rows.sizes(), rows.options()), dense_rows = rows.contiguous(), dense_index = index.contiguous();
    check_range("unpermute", "index", dense_index, 0, rows.size(0));
    if (out.numel() == 0) return out;
    const EmbeddingTiling tiling = tiling_of_copy(rows.size(0), rows.size(1));
    kernel.run(rows.device(), {data(dense_index), data(dense_rows), mutable_data(out)}, &tiling, copy_blocks(rows), Path::kNative);
    return out;
}

// ---- combine

struct Combination {
    c10::SymInt num_tokens;
    int64_t num_experts, segments, first, last;
};

void check_combine(const char* op, const at::Tensor& y, const at::Tensor& weights, const at::Tensor& token_ids, const at::Tensor& expert_ids) {
    check_rows(op, "y", y);
    check_operand(op, "weights", weights, at::kFloat, y.device());
    TORCH_CHECK_VALUE(weights.dim() == 1 && weights.sym_size(0) == y.sym_size(0), op, ": weights must be [R = ", y.sym_size(0), "], found shape ",
                      weights.sym_sizes());
    check_ids(op, "token_ids", token_ids, y.sym_size(0), y.device());
    check_ids(op, "expert_ids", expert_ids, y.sym_size(0), y.device());
}

void check_tree(const char* op, const Combination& c) {
    const int64_t size = c.last - c.first;
    TORCH_CHECK_VALUE(c.num_experts > 0 && c.segments > 0 && (c.segments & (c.segments - 1)) == 0 && c.num_experts % c.segments == 0 &&
                          c.segments < int64_t(1) << kCombineMaxDepth,
                      op, ": segments must be a power of two below 2^", kCombineMaxDepth, " that divides the experts, found ", c.segments, " of ",
                      c.num_experts, " experts");
    const int64_t per_segment = c.num_experts / c.segments, pieces = size / per_segment;
    TORCH_CHECK_VALUE(size > 0 && c.first >= 0 && c.last <= c.num_experts && size % per_segment == 0 && (pieces & (pieces - 1)) == 0 && c.first % size == 0,
                      op, ": experts [", c.first, ", ", c.last, ") are not a subtree of ", c.num_experts, " experts in ", c.segments, " segments");
}

int64_t depth_of(int64_t segments) {
    int64_t depth = 1;
    for (; segments > 1; segments /= 2) ++depth;
    return depth;
}

at::Tensor combine_to(const char* op, const ModelDtypeKernels& kernels, at::ScalarType out_dtype, const at::Tensor& y, const at::Tensor& weights,
                      const at::Tensor& token_ids, const at::Tensor& expert_ids, const Combination& c) {
    check_combine(op, y, weights, token_ids, expert_ids);
    check_tree(op, c);
    const int64_t num_tokens = c.num_tokens.expect_int();
    const at::Tensor out = at::empty({num_tokens, y.size(1)}, y.options().dtype(out_dtype));
    if (out.numel() == 0) return out;
    const at::Tensor dense_y = y.contiguous(), dense_weights = weights.contiguous(), experts = expert_ids.contiguous(), tokens = token_ids.contiguous();
    check_range(op, "token_ids", tokens, 0, num_tokens);
    check_range(op, "expert_ids", experts, c.first, c.last);
    const at::Tensor order = at::argsort(at::add(experts, tokens, c.num_experts));
    const at::Tensor starts = at::searchsorted(tokens.index_select(0, order), at::arange(num_tokens + 1, tokens.options()));
    CombineTiling tiling = {num_tokens, y.size(0), y.size(1), c.num_experts / c.segments, depth_of(c.segments), 0};
    tiling.tile_columns = std::min({kCombineMaxTileColumns, kCombineUbElements / tiling.depth / 64 * 64, (tiling.hidden + 63) / 64 * 64});
    const int64_t pieces = tiling.tokens * ((tiling.hidden + tiling.tile_columns - 1) / tiling.tile_columns);
    kernels[y.scalar_type()].run(y.device(), {data(dense_y), data(dense_weights), data(order), data(experts), data(starts), mutable_data(out)}, &tiling,
                                 vector_blocks(y.device(), pieces, y.numel() + out.numel()), Path::kNative);
    return out;
}

at::Tensor combine(const at::Tensor& y, const at::Tensor& weights, const at::Tensor& token_ids, const at::Tensor& expert_ids, int64_t num_tokens,
                   int64_t num_experts, int64_t segments, int64_t first, int64_t last) {
    static const ModelDtypeKernels kernels("combine");
    return combine_to("combine", kernels, at::kFloat, y, weights, token_ids, expert_ids, {num_tokens, num_experts, segments, first, last});
}

at::Tensor combine_rows(const at::Tensor& y, const at::Tensor& weights, const at::Tensor& token_ids, const at::Tensor& expert_ids, int64_t num_tokens,
                        int64_t num_experts, int64_t segments) {
    static const ModelDtypeKernels kernels("combine_rows");
    return combine_to("combine_rows", kernels, y.scalar_type(), y, weights, token_ids, expert_ids, {num_tokens, num_experts, segments, 0, num_experts});
}

void check_combine_backward(const at::Tensor& dout, const at::Tensor& y, const at::Tensor& weights, const at::Tensor& token_ids) {
    check_combine("combine_backward", y, weights, token_ids, token_ids);
    check_operand("combine_backward", "dout", dout, at::kFloat, y.device());
    TORCH_CHECK_VALUE(dout.dim() == 2 && dout.sym_size(1) == y.sym_size(1), "combine_backward: dout must be [T, H = ", y.sym_size(1), "], found shape ",
                      dout.sym_sizes());
}

std::tuple<at::Tensor, at::Tensor> combine_backward(const at::Tensor& dout, const at::Tensor& y, const at::Tensor& weights, const at::Tensor& token_ids) {
    static const ModelDtypeKernels kernels("combine_backward");
    check_combine_backward(dout, y, weights, token_ids);
    const at::Tensor dy = at::empty(y.sizes(), y.options()), dweights = at::empty({y.size(0)}, weights.options());
    if (y.numel() == 0) return {dy, dweights.zero_()};
    const at::Tensor dense_dout = dout.contiguous(), dense_y = y.contiguous(), dense_weights = weights.contiguous(), tokens = token_ids.contiguous();
    check_range("combine_backward", "token_ids", tokens, 0, dout.size(0));
    const CombineBackwardTiling tiling = {y.size(0), y.size(1)};
    kernels[y.scalar_type()].run(y.device(), {data(dense_dout), data(dense_y), data(dense_weights), data(tokens), mutable_data(dy), mutable_data(dweights)},
                                 &tiling, vector_blocks(y.device(), tiling.rows, y.numel()), Path::kNative);
    return {dy, dweights};
}

// ---- shapes

at::Tensor permute_meta(const at::Tensor& x, const at::Tensor& token_ids, const OptionalTensor& expert_ids, int64_t, int64_t) {
    check_permute(x, token_ids, expert_ids);
    return at::empty_symint({token_ids.sym_size(0), x.sym_size(1)}, x.options());
}
at::Tensor unpermute_meta(const at::Tensor& rows, const at::Tensor& index) {
    check_unpermute(rows, index);
    return at::empty_symint(rows.sym_sizes(), rows.options());
}
at::Tensor combine_meta(const at::Tensor& y, const at::Tensor& weights, const at::Tensor& token_ids, const at::Tensor& expert_ids, c10::SymInt num_tokens,
                        int64_t, int64_t, int64_t, int64_t) {
    check_combine("combine", y, weights, token_ids, expert_ids);
    return at::empty_symint({num_tokens, y.sym_size(1)}, y.options().dtype(at::kFloat));
}
at::Tensor combine_rows_meta(const at::Tensor& y, const at::Tensor& weights, const at::Tensor& token_ids, const at::Tensor& expert_ids,
                             c10::SymInt num_tokens, int64_t, int64_t) {
    check_combine("combine_rows", y, weights, token_ids, expert_ids);
    return at::empty_symint({num_tokens, y.sym_size(1)}, y.options());
}
std::tuple<at::Tensor, at::Tensor> combine_backward_meta(const at::Tensor& dout, const at::Tensor& y, const at::Tensor& weights,
                                                         const at::Tensor& token_ids) {
    check_combine_backward(dout, y, weights, token_ids);
    return {at::empty_symint(y.sym_sizes(), y.options()), at::empty_symint(weights.sym_sizes(), weights.options())};
}

// ---- autograd

using Ids = const at::Tensor&;
using PermuteSchema = at::Tensor(const at::Tensor&, Ids, const OptionalTensor&, int64_t, int64_t);
using UnpermuteSchema = at::Tensor(const at::Tensor&, Ids);
using CombineSchema = at::Tensor(const at::Tensor&, const at::Tensor&, Ids, Ids, c10::SymInt, int64_t, int64_t, int64_t, int64_t);
using CombineRowsSchema = at::Tensor(const at::Tensor&, const at::Tensor&, Ids, Ids, c10::SymInt, int64_t, int64_t);
using CombineBackwardSchema = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&, Ids);
using torch::autograd::AutogradContext, torch::autograd::variable_list;

// A token's gradient is the sum over its copies, by the expert tree.
struct DifferentiablePermute : torch::autograd::Function<DifferentiablePermute> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& x, Ids token_ids, Ids expert_ids, int64_t num_experts, int64_t segments) {
        static const auto op = typed_op<PermuteSchema>("permute");
        at::AutoDispatchBelowADInplaceOrView below;
        context->save_for_backward({token_ids, expert_ids});
        context->saved_data["tree"] = std::vector<int64_t>{x.size(0), num_experts, segments};
        return op.call(x, token_ids, expert_ids, num_experts, segments);
    }
    static variable_list backward(AutogradContext* context, variable_list drows) {
        static const auto op = typed_op<CombineRowsSchema>("combine_rows");
        const auto saved = context->get_saved_variables();
        const auto tree = context->saved_data["tree"].toIntVector();
        const at::Tensor ones = at::ones({drows[0].size(0)}, drows[0].options().dtype(at::kFloat));
        return {op.call(drows[0], ones, saved[0], saved[1], tree[0], tree[1], tree[2]), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
    }
};

struct DifferentiableUnpermute : torch::autograd::Function<DifferentiableUnpermute> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, Ids index) {
        static const auto op = typed_op<UnpermuteSchema>("unpermute");
        at::AutoDispatchBelowADInplaceOrView below;
        context->save_for_backward({index});
        return op.call(rows, index);
    }
    static variable_list backward(AutogradContext* context, variable_list dout) {
        static const auto op = typed_op<PermuteSchema>("permute");
        return {op.call(dout[0], context->get_saved_variables()[0], std::nullopt, 0, 0), at::Tensor()};
    }
};

// The gradient of a combination, whose value may have been rounded: the derivative of rounding is one.
std::tuple<at::Tensor, at::Tensor> gradient_of_combine(AutogradContext* context, const at::Tensor& dout) {
    static const auto op = typed_op<CombineBackwardSchema>("combine_backward");
    const auto saved = context->get_saved_variables();
    return op.call(dout.to(at::kFloat), saved[0], saved[1], saved[2]);
}

struct DifferentiableCombine : torch::autograd::Function<DifferentiableCombine> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& y, const at::Tensor& weights, Ids token_ids, Ids expert_ids, const Combination& c) {
        static const auto op = typed_op<CombineSchema>("combine");
        at::AutoDispatchBelowADInplaceOrView below;
        context->save_for_backward({y, weights, token_ids});
        return op.call(y, weights, token_ids, expert_ids, c.num_tokens, c.num_experts, c.segments, c.first, c.last);
    }
    static variable_list backward(AutogradContext* context, variable_list dout) {
        const auto [dy, dweights] = gradient_of_combine(context, dout[0]);
        return {dy, dweights, at::Tensor(), at::Tensor(), at::Tensor()};
    }
};

struct DifferentiableCombineRows : torch::autograd::Function<DifferentiableCombineRows> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& y, const at::Tensor& weights, Ids token_ids, Ids expert_ids, const Combination& c) {
        static const auto op = typed_op<CombineRowsSchema>("combine_rows");
        at::AutoDispatchBelowADInplaceOrView below;
        context->save_for_backward({y, weights, token_ids});
        return op.call(y, weights, token_ids, expert_ids, c.num_tokens, c.num_experts, c.segments);
    }
    static variable_list backward(AutogradContext* context, variable_list dout) {
        const auto [dy, dweights] = gradient_of_combine(context, dout[0]);
        return {dy, dweights, at::Tensor(), at::Tensor(), at::Tensor()};
    }
};

at::Tensor permute_autograd(const at::Tensor& x, Ids token_ids, const OptionalTensor& expert_ids, int64_t num_experts, int64_t segments) {
    static const auto op = typed_op<PermuteSchema>("permute");
    if (needs_gradient(x)) {
        TORCH_CHECK_VALUE(expert_ids, "permute: the gradient of x is a sum by the expert tree: expert_ids, num_experts and segments are needed");
        return DifferentiablePermute::apply(x, token_ids, *expert_ids, num_experts, segments);
    }
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, token_ids, expert_ids, num_experts, segments);
}

at::Tensor unpermute_autograd(const at::Tensor& rows, Ids index) {
    static const auto op = typed_op<UnpermuteSchema>("unpermute");
    if (needs_gradient(rows)) return DifferentiableUnpermute::apply(rows, index);
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(rows, index);
}

at::Tensor combine_autograd(const at::Tensor& y, const at::Tensor& weights, Ids token_ids, Ids expert_ids, c10::SymInt num_tokens, int64_t num_experts,
                            int64_t segments, int64_t first, int64_t last) {
    static const auto op = typed_op<CombineSchema>("combine");
    if (needs_gradient(y, weights))
        return DifferentiableCombine::apply(y, weights, token_ids, expert_ids, Combination{num_tokens, num_experts, segments, first, last});
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(y, weights, token_ids, expert_ids, num_tokens, num_experts, segments, first, last);
}

at::Tensor combine_rows_autograd(const at::Tensor& y, const at::Tensor& weights, Ids token_ids, Ids expert_ids, c10::SymInt num_tokens, int64_t num_experts,
                                 int64_t segments) {
    static const auto op = typed_op<CombineRowsSchema>("combine_rows");
    if (needs_gradient(y, weights))
        return DifferentiableCombineRows::apply(y, weights, token_ids, expert_ids, Combination{num_tokens, num_experts, segments, 0, num_experts});
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(y, weights, token_ids, expert_ids, num_tokens, num_experts, segments);
}

void implement(torch::Library& library) {
    library.impl("permute", &permute);
    library.impl("unpermute", &unpermute);
    library.impl("combine", &combine);
    library.impl("combine_rows", &combine_rows);
    library.impl("combine_backward", &combine_backward);
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_FRAGMENT(megatron_ext, library) {
    library.def("permute(Tensor x, Tensor token_ids, Tensor? expert_ids=None, int num_experts=0, int segments=0) -> Tensor");
    library.def("unpermute(Tensor rows, Tensor index) -> Tensor");
    library.def("combine(Tensor y, Tensor weights, Tensor token_ids, Tensor expert_ids, SymInt num_tokens, int num_experts, int segments, int first, "
                "int last) -> Tensor");
    library.def("combine_rows(Tensor y, Tensor weights, Tensor token_ids, Tensor expert_ids, SymInt num_tokens, int num_experts, int segments) -> Tensor");
    library.def("combine_backward(Tensor dout, Tensor y, Tensor weights, Tensor token_ids) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(megatron_ext, Meta, library) {
    library.impl("permute", &megatron_ext::permute_meta);
    library.impl("unpermute", &megatron_ext::unpermute_meta);
    library.impl("combine", &megatron_ext::combine_meta);
    library.impl("combine_rows", &megatron_ext::combine_rows_meta);
    library.impl("combine_backward", &megatron_ext::combine_backward_meta);
}
TORCH_LIBRARY_IMPL(megatron_ext, Autograd, library) {
    library.impl("permute", &megatron_ext::permute_autograd);
    library.impl("unpermute", &megatron_ext::unpermute_autograd);
    library.impl("combine", &megatron_ext::combine_autograd);
    library.impl("combine_rows", &megatron_ext::combine_rows_autograd);
    megatron_ext::refuse_gradients(library, {"combine_backward"});
}
MEGATRON_EXT_IMPLEMENT(megatron_ext::implement)
