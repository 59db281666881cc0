// torch.ops.megatron_ext: route and route_backward. Legend: T tokens, E experts, k slots.
#include <torch/csrc/autograd/custom_function.h>

#include "binding.h"
#include "differentiable.h"
#include "router_tiling.h"

namespace megatron_ext {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using Schema = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, int64_t, c10::string_view, bool, double, const OptionalTensor&, std::optional<int64_t>,
                                                  std::optional<int64_t>);
using BackwardSchema = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::string_view, bool, double);

void check_score_function(const char* op, c10::string_view score_function) {
    TORCH_CHECK_VALUE(score_function == "softmax" || score_function == "sigmoid", op, ": score_function must be 'softmax' or 'sigmoid', found '",
                      score_function, "'");
}

void check_logits(const char* op, const at::Tensor& logits) {
    check_same_dtype(op, "logits", logits, at::kFloat);
    TORCH_CHECK_VALUE(logits.dim() == 2, op, ": logits must be [T, E], found shape ", logits.sym_sizes());
}

void check_bias(const OptionalTensor& bias, const at::Tensor& logits) {
    if (!bias) return;
    check_same_device("route", "correction_bias", *bias, logits.device());
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == logits.sym_size(1), "route: correction_bias must be [E = ", logits.sym_size(1),
                      "], found shape ", bias->sym_sizes());
}

void check_sizes(const char* op, int64_t experts, int64_t top_k) {
    TORCH_CHECK_VALUE(experts <= kRouterMaxExperts && top_k <= kRouterMaxSlots, op, ": at most ", kRouterMaxExperts, " experts and ", kRouterMaxSlots,
                      " slots are supported (a row has to fit into the vector core's memory), found ", experts, " and ", top_k);
    TORCH_CHECK_VALUE(top_k > 0 && top_k <= experts, op, ": top_k=", top_k, " of ", experts, " experts");
}

// Fills in the groups.
void limit_groups(RouterTiling& t, std::optional<int64_t> num_groups, std::optional<int64_t> topk_groups) {
    if (!num_groups) return;
    t.groups = *num_groups;
    t.kept_groups = topk_groups.value_or(0);
    t.best_of_group = t.biased ? 2 : 1;
    TORCH_CHECK_VALUE(t.groups > 0 && t.groups <= kRouterMaxSlots && t.experts % t.groups == 0, "route: ", t.experts, " experts cannot form ", t.groups,
                      " groups (at most ", kRouterMaxSlots, ")");
    TORCH_CHECK_VALUE(t.kept_groups > 0 && t.kept_groups <= t.groups, "route: topk_groups=", t.kept_groups, " of ", t.groups, " groups");
    const int64_t size = t.experts / t.groups;
    TORCH_CHECK_VALUE(t.top_k <= t.kept_groups * size, "route: top_k=", t.top_k, ", but ", t.kept_groups, " groups hold only ", t.kept_groups * size,
                      " experts");
    TORCH_CHECK_VALUE(size >= t.best_of_group, "route: with a correction bias the best two experts of a group are its score, but groups of ", t.experts, " / ",
                      t.groups, " hold one");
}

RouterTiling tiling_of(const at::Tensor& logits, int64_t top_k, c10::string_view score_function, bool renormalize, double scale) {
    RouterTiling tiling{};
    tiling.tokens = logits.size(0);
    tiling.experts = logits.size(1);
    tiling.top_k = top_k;
    tiling.scale = float(scale);
    tiling.sigmoid = score_function == "sigmoid";
    tiling.renormalize = renormalize;
    return tiling;
}

int64_t token_blocks(const at::Tensor& logits) { return vector_blocks(logits.device(), logits.size(0), logits.numel()); }

std::tuple<at::Tensor, at::Tensor> route(const at::Tensor& logits, int64_t top_k, c10::string_view score_function, bool renormalize, double scale,
                                         const OptionalTensor& correction_bias, std::optional<int64_t> num_groups, std::optional<int64_t> topk_groups) {
    static const Kernel kernel("route_f32");
    check_logits("route", logits);
    check_score_function("route", score_function);
    check_bias(correction_bias, logits);
    check_sizes("route", logits.size(1), top_k);
    RouterTiling tiling = tiling_of(logits, top_k, score_function, renormalize, scale);
    tiling.biased = correction_bias.has_value();
    limit_groups(tiling, num_groups, topk_groups);
    const at::Tensor weights = at::empty({tiling.tokens, top_k}, logits.options()), ids = at::empty({tiling.tokens, top_k}, logits.options().dtype(at::kLong));
    if (tiling.tokens == 0) return {weights, ids};
    const at::Tensor dense = logits.contiguous(), bias = correction_bias ? correction_bias->to(at::kFloat).contiguous() : at::Tensor();
    kernel.run(logits.device(), {data(dense), bias.defined() ? data(bias) : nullptr, mutable_data(weights), mutable_data(ids)}, &tiling,
               token_blocks(logits), Path::kNative);
    return {weights, ids};
}

void check_backward(const at::Tensor& dweights, const at::Tensor& logits, const at::Tensor& ids) {
    check_logits("route_backward", logits);
    check_operand("route_backward", "dweights", dweights, at::kFloat, logits.device());
    check_operand("route_backward", "ids", ids, at::kLong, logits.device());
    TORCH_CHECK_VALUE(dweights.dim() == 2 && dweights.sym_sizes() == ids.sym_sizes() && ids.sym_size(0) == logits.sym_size(0),
                      "route_backward: dweights has shape ", dweights.sym_sizes(), ", ids ", ids.sym_sizes(), ", logits ", logits.sym_sizes(),
                      ": expected [T, k], [T, k] and [T, E]");
}

void check_ids(const at::Tensor& ids, int64_t experts) {
    if (!ids.is_cpu()) return;
    for (const int64_t *id = ids.const_data_ptr<int64_t>(), *end = id + ids.numel(); id != end; ++id)
        TORCH_CHECK_INDEX(*id >= 0 && *id < experts, "route_backward: ids must be 0 to ", experts - 1, ", found ", *id);
}

at::Tensor route_backward(const at::Tensor& dweights, const at::Tensor& logits, const at::Tensor& ids, c10::string_view score_function, bool renormalize,
                          double scale) {
    static const Kernel kernel("route_backward_f32");
    check_backward(dweights, logits, ids);
    check_score_function("route_backward", score_function);
    check_sizes("route_backward", logits.size(1), ids.size(1));
    const at::Tensor dlogits = at::empty(logits.sizes(), logits.options());
    if (logits.numel() == 0) return dlogits;
    const at::Tensor dense = logits.contiguous(), dense_dweights = dweights.contiguous(), dense_ids = ids.contiguous();
    check_ids(dense_ids, logits.size(1));
    const RouterTiling tiling = tiling_of(logits, ids.size(1), score_function, renormalize, scale);
    kernel.run(logits.device(), {data(dense_dweights), data(dense), data(dense_ids), mutable_data(dlogits)}, &tiling, token_blocks(logits), Path::kNative);
    return dlogits;
}

std::tuple<at::Tensor, at::Tensor> route_meta(const at::Tensor& logits, int64_t top_k, c10::string_view score_function, bool, double,
                                              const OptionalTensor& correction_bias, std::optional<int64_t>, std::optional<int64_t>) {
    check_logits("route", logits);
    check_score_function("route", score_function);
    check_bias(correction_bias, logits);
    const c10::SymInt sizes[] = {logits.sym_size(0), top_k};
    return {at::empty_symint(sizes, logits.options()), at::empty_symint(sizes, logits.options().dtype(at::kLong))};
}

at::Tensor route_backward_meta(const at::Tensor& dweights, const at::Tensor& logits, const at::Tensor& ids, c10::string_view, bool, double) {
    check_backward(dweights, logits, ids);
    return at::empty_symint(logits.sym_sizes(), logits.options());
}

struct DifferentiableRoute : torch::autograd::Function<DifferentiableRoute> {
    static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const at::Tensor& logits, int64_t top_k,
                                                  std::string score_function, bool renormalize, double scale, const OptionalTensor& correction_bias,
                                                  std::optional<int64_t> num_groups, std::optional<int64_t> topk_groups) {
        static const auto op = typed_op<Schema>("route");
        at::AutoDispatchBelowADInplaceOrView below;
        const auto [weights, ids] = op.call(logits, top_k, score_function, renormalize, scale, correction_bias, num_groups, topk_groups);
        context->save_for_backward({logits, ids});
        context->saved_data["score_function"] = score_function;
        context->saved_data["renormalize"] = renormalize;
        context->saved_data["scale"] = scale;
        context->mark_non_differentiable({ids});
        return {weights, ids};
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
        static const auto op = typed_op<BackwardSchema>("route_backward");
        const auto saved = context->get_saved_variables();
        torch::autograd::variable_list results(8);
        results[0] = op.call(gradients[0], saved[0], saved[1], context->saved_data["score_function"].toStringRef(),
                             context->saved_data["renormalize"].toBool(), context->saved_data["scale"].toDouble());
        return results;
    }
};

std::tuple<at::Tensor, at::Tensor> route_autograd(const at::Tensor& logits, int64_t top_k, c10::string_view score_function, bool renormalize, double scale,
                                                  const OptionalTensor& correction_bias, std::optional<int64_t> num_groups,
                                                  std::optional<int64_t> topk_groups) {
    static const auto op = typed_op<Schema>("route");
    if (needs_gradient(logits)) {
        const auto results = DifferentiableRoute::apply(logits, top_k, std::string(score_function), renormalize, scale, correction_bias, num_groups,
                                                        topk_groups);
        return {results[0], results[1]};
    }
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(logits, top_k, score_function, renormalize, scale, correction_bias, num_groups, topk_groups);
}

void implement(torch::Library& library) {
    library.impl("route", &route);
    library.impl("route_backward", &route_backward);
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_FRAGMENT(megatron_ext, library) {
    library.def("route(Tensor logits, int top_k, str score_function='softmax', bool renormalize=True, float scale=1.0, Tensor? correction_bias=None, "
                "int? num_groups=None, int? topk_groups=None) -> (Tensor, Tensor)");
    library.def("route_backward(Tensor dweights, Tensor logits, Tensor ids, str score_function, bool renormalize, float scale) -> Tensor");
}
TORCH_LIBRARY_IMPL(megatron_ext, Meta, library) {
    library.impl("route", &megatron_ext::route_meta);
    library.impl("route_backward", &megatron_ext::route_backward_meta);
}
TORCH_LIBRARY_IMPL(megatron_ext, Autograd, library) {
    library.impl("route", &megatron_ext::route_autograd);
    megatron_ext::refuse_gradients(library, {"route_backward"});
}
MEGATRON_EXT_IMPLEMENT(megatron_ext::implement)
