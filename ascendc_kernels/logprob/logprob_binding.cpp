// torch.ops.megatron_ext: vocab_max, vocab_exp_sum, logprob_from_parts, vocab_dlogits, token_logprob, log_softmax.
#include <ATen/ops/div.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include "binding.h"
#include "differentiable.h"
#include "logits.h"
#include "logprob_tiling.h"

namespace megatron_ext {
namespace {

void check_valid(const char* op, int64_t valid, const at::Tensor& logits) {
    TORCH_CHECK_VALUE(valid >= 0 && logits.sym_size(1) >= valid, op, ": valid must be 0 to ", logits.sym_size(1), ", the columns of logits, found ",
                      valid);
}

LogprobTiling tiling_of(const at::Tensor& logits, const at::Tensor& temperature, int64_t valid, int64_t segments) {
    LogprobTiling tiling{};
    tiling.rows = logits.size(0);
    tiling.columns = logits.size(1);
    tiling.row_stride = logits.stride(0);
    tiling.valid = valid;
    tiling.segments = segments;
    tiling.segment = segment_of(tiling.columns, segments);
    tiling.scaled = temperature.defined();
    tiling.temperature_stride = tiling.scaled && temperature.numel() > 1;
    return tiling;
}

int64_t row_blocks(const at::Tensor& logits) { return vector_blocks(logits.device(), logits.size(0), logits.numel()); }

at::Tensor empty_rows(const at::Tensor& logits) { return at::empty_symint({logits.sym_size(0)}, logits.options()); }

at::Tensor vocab_max(const at::Tensor& logits, int64_t valid, const OptionalTensor& temperature) {
    static const Kernel kernel("vocab_max_f32");
    check_logits("vocab_max", logits);
    check_valid("vocab_max", valid, logits);
    check_temperature("vocab_max", temperature, logits);
    const at::Tensor divisor = dense_temperature("vocab_max", temperature);
    if (valid == 0) return at::full({logits.size(0)}, -std::numeric_limits<float>::infinity(), logits.options());
    const at::Tensor row_max = empty_rows(logits);
    if (logits.size(0) == 0) return row_max;
    const LogprobTiling tiling = tiling_of(logits, divisor, valid, 1);
    kernel.run(logits.device(), {data(logits), optional_data(divisor), mutable_data(row_max)}, &tiling, row_blocks(logits), Path::kNative);
    return row_max;
}

void check_exp_sum(const at::Tensor& logits, const at::Tensor& row_max, int64_t valid, int64_t segments, const OptionalTensor& temperature) {
    check_logits("vocab_exp_sum", logits);
    check_rows("vocab_exp_sum", "row_max", row_max, at::kFloat, logits);
    check_valid("vocab_exp_sum", valid, logits);
    check_segments("vocab_exp_sum", segments, kLogprobMaxSegments);
    check_temperature("vocab_exp_sum", temperature, logits);
    TORCH_CHECK_VALUE(logits.sym_size(1) % (kFractal * segments) == 0, "vocab_exp_sum: ", logits.sym_size(1), " columns cannot be cut into ",
                      segments, " segments of whole ", kFractal, "-element blocks");
}

at::Tensor vocab_exp_sum(const at::Tensor& logits, const at::Tensor& row_max, int64_t valid, int64_t segments, const OptionalTensor& temperature) {
    static const Kernel kernel("vocab_exp_sum_f32");
    check_exp_sum(logits, row_max, valid, segments, temperature);
    const at::Tensor divisor = dense_temperature("vocab_exp_sum", temperature), dense_max = row_max.contiguous();
    if (valid == 0) return at::zeros({logits.size(0)}, logits.options());
    const at::Tensor exp_sum = empty_rows(logits);
    if (logits.size(0) == 0) return exp_sum;
    const LogprobTiling tiling = tiling_of(logits, divisor, valid, segments);
    kernel.run(logits.device(), {data(logits), optional_data(divisor), data(dense_max), mutable_data(exp_sum)}, &tiling, row_blocks(logits),
               Path::kNative);
    return exp_sum;
}

void check_parts(const at::Tensor& target_logit, const at::Tensor& row_max, const at::Tensor& exp_sum) {
    const char* op = "logprob_from_parts";
    check_same_dtype(op, "target_logit", target_logit, at::kFloat);
    check_operand(op, "row_max", row_max, at::kFloat, target_logit.device());
    check_operand(op, "exp_sum", exp_sum, at::kFloat, target_logit.device());
    TORCH_CHECK_VALUE(target_logit.sym_sizes() == row_max.sym_sizes() && target_logit.sym_sizes() == exp_sum.sym_sizes(), op,
                      ": equal shapes are needed, found target_logit ", target_logit.sym_sizes(), ", row_max ", row_max.sym_sizes(), ", exp_sum ",
                      exp_sum.sym_sizes());
}

at::Tensor logprob_from_parts(const at::Tensor& target_logit, const at::Tensor& row_max, const at::Tensor& exp_sum) {
    static const Kernel kernel("logprob_from_parts_f32");
    check_parts(target_logit, row_max, exp_sum);
    const at::Tensor target = target_logit.contiguous(), dense_max = row_max.contiguous(), dense_sum = exp_sum.contiguous();
    const at::Tensor logprob = at::empty(target.sizes(), target.options());
    if (target.numel() == 0) return logprob;
    LogprobTiling tiling{};
    tiling.rows = target.numel();
    const int64_t tiles = (tiling.rows + kLogprobTile - 1) / kLogprobTile;
    kernel.run(target.device(), {data(target), data(dense_max), data(dense_sum), mutable_data(logprob)}, &tiling,
               vector_blocks(target.device(), tiles, tiling.rows), Path::kNative);
    return logprob;
}

const Kernel& dlogits_kernel(at::ScalarType dtype) {
    static const Kernel f32("vocab_dlogits_f32");
    static const ModelDtypeKernels rounded("vocab_dlogits");
    return dtype == at::kFloat ? f32 : rounded[dtype];
}

void check_dlogits_dtype(const char* op, const char* name, at::ScalarType dtype) {
    TORCH_CHECK_TYPE(dtype == at::kFloat || is_model_dtype(dtype), op, ": ", name, " must be float32, bfloat16 or float16, found ", dtype);
}

void check_dlogits(const at::Tensor& logits, const at::Tensor& row_max, const at::Tensor& exp_sum, const at::Tensor& targets, const at::Tensor& grad,
                   int64_t valid, at::ScalarType dtype, const OptionalTensor& temperature) {
    const char* op = "vocab_dlogits";
    check_logits(op, logits);
    check_rows(op, "row_max", row_max, at::kFloat, logits);
    check_rows(op, "exp_sum", exp_sum, at::kFloat, logits);
    check_rows(op, "targets", targets, at::kLong, logits);
    check_rows(op, "grad", grad, at::kFloat, logits);
    check_valid(op, valid, logits);
    check_temperature(op, temperature, logits);
    check_dlogits_dtype(op, "dtype", dtype);
}

at::Tensor vocab_dlogits(const at::Tensor& logits, const at::Tensor& row_max, const at::Tensor& exp_sum, const at::Tensor& targets,
                         const at::Tensor& grad, int64_t valid, at::ScalarType dtype, const OptionalTensor& temperature) {
    check_dlogits(logits, row_max, exp_sum, targets, grad, valid, dtype, temperature);
    const at::Tensor dlogits = at::empty(logits.sizes(), logits.options().dtype(dtype)), divisor = dense_temperature("vocab_dlogits", temperature);
    if (logits.size(0) == 0) return dlogits;
    const at::Tensor dense_max = row_max.contiguous(), dense_sum = exp_sum.contiguous(), dense_targets = targets.contiguous();
    const at::Tensor scaled_grad = (divisor.defined() ? at::div(grad, divisor) : grad).contiguous();
    const LogprobTiling tiling = tiling_of(logits, divisor, valid, 1);
    dlogits_kernel(dtype).run(logits.device(),
                              {data(logits), optional_data(divisor), data(dense_max), data(dense_sum), data(dense_targets), data(scaled_grad),
                               mutable_data(dlogits)},
                              &tiling, row_blocks(logits), Path::kNative);
    return dlogits;
}

void check_token(const at::Tensor& logits, const at::Tensor& ids, const OptionalTensor& temperature, int64_t segments) {
    check_logits("token_logprob", logits);
    check_rows("token_logprob", "ids", ids, at::kLong, logits);
    check_temperature("token_logprob", temperature, logits);
    check_segments("token_logprob", segments, kLogprobMaxSegments);
}

void check_ids(const at::Tensor& ids, int64_t vocabulary) {
    if (!ids.is_cpu()) return;
    const int64_t* values = ids.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < ids.numel(); ++i)
        TORCH_CHECK_INDEX(values[i] >= 0 && values[i] < vocabulary, "token_logprob: ids must be in [0, ", vocabulary, "), found ", values[i],
                          " at ", i);
}

// (logprob, row maximum, exp sum); the gradient needs the parts.
using Parts = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Parts token_logprob_parts(const at::Tensor& logits, const at::Tensor& ids, const OptionalTensor& temperature, int64_t segments) {
    static const Kernel kernel("token_logprob_f32");
    check_token(logits, ids, temperature, segments);
    const at::Tensor dense_ids = ids.contiguous(), divisor = dense_temperature("token_logprob", temperature);
    check_ids(dense_ids, logits.size(1));
    Parts parts(empty_rows(logits), empty_rows(logits), empty_rows(logits));
    const auto& [logprob, row_max, exp_sum] = parts;
    if (logits.size(0) == 0) return parts;
    const LogprobTiling tiling = tiling_of(logits, divisor, logits.size(1), segments);
    kernel.run(logits.device(),
               {data(logits), optional_data(divisor), data(dense_ids), mutable_data(logprob), mutable_data(row_max), mutable_data(exp_sum)}, &tiling,
               row_blocks(logits), Path::kNative);
    return parts;
}

at::Tensor token_logprob(const at::Tensor& logits, const at::Tensor& ids, const OptionalTensor& temperature, int64_t segments, at::ScalarType dtype) {
    check_dlogits_dtype("token_logprob", "dlogits_dtype", dtype);
    return std::get<0>(token_logprob_parts(logits, ids, temperature, segments));
}

at::Tensor log_softmax(const at::Tensor& logits, const OptionalTensor& temperature, int64_t segments) {
    static const Kernel kernel("log_softmax_f32");
    check_logits("log_softmax", logits);
    check_temperature("log_softmax", temperature, logits);
    check_segments("log_softmax", segments, kLogprobMaxSegments);
    const at::Tensor logprobs = at::empty(logits.sizes(), logits.options()), divisor = dense_temperature("log_softmax", temperature);
    if (logits.size(0) == 0) return logprobs;
    const LogprobTiling tiling = tiling_of(logits, divisor, logits.size(1), segments);
    kernel.run(logits.device(), {data(logits), optional_data(divisor), mutable_data(logprobs)}, &tiling, row_blocks(logits), Path::kNative);
    return logprobs;
}

at::Tensor vocab_max_meta(const at::Tensor& logits, int64_t valid, const OptionalTensor& temperature) {
    check_logits("vocab_max", logits);
    check_valid("vocab_max", valid, logits);
    check_temperature("vocab_max", temperature, logits);
    return empty_rows(logits);
}

at::Tensor vocab_exp_sum_meta(const at::Tensor& logits, const at::Tensor& row_max, int64_t valid, int64_t segments,
                              const OptionalTensor& temperature) {
    check_exp_sum(logits, row_max, valid, segments, temperature);
    return empty_rows(logits);
}

at::Tensor logprob_from_parts_meta(const at::Tensor& target_logit, const at::Tensor& row_max, const at::Tensor& exp_sum) {
    check_parts(target_logit, row_max, exp_sum);
    return at::empty_symint(target_logit.sym_sizes(), target_logit.options());
}

at::Tensor vocab_dlogits_meta(const at::Tensor& logits, const at::Tensor& row_max, const at::Tensor& exp_sum, const at::Tensor& targets,
                              const at::Tensor& grad, int64_t valid, at::ScalarType dtype, const OptionalTensor& temperature) {
    check_dlogits(logits, row_max, exp_sum, targets, grad, valid, dtype, temperature);
    return at::empty_symint(logits.sym_sizes(), logits.options().dtype(dtype));
}

Parts token_logprob_parts_meta(const at::Tensor& logits, const at::Tensor& ids, const OptionalTensor& temperature, int64_t segments) {
    check_token(logits, ids, temperature, segments);
    return {empty_rows(logits), empty_rows(logits), empty_rows(logits)};
}

at::Tensor token_logprob_meta(const at::Tensor& logits, const at::Tensor& ids, const OptionalTensor& temperature, int64_t segments,
                              at::ScalarType dtype) {
    check_dlogits_dtype("token_logprob", "dlogits_dtype", dtype);
    return std::get<0>(token_logprob_parts_meta(logits, ids, temperature, segments));
}

at::Tensor log_softmax_meta(const at::Tensor& logits, const OptionalTensor& temperature, int64_t segments) {
    check_logits("log_softmax", logits);
    check_temperature("log_softmax", temperature, logits);
    check_segments("log_softmax", segments, kLogprobMaxSegments);
    return at::empty_symint(logits.sym_sizes(), logits.options());
}

using PartsSchema = Parts(const at::Tensor&, const at::Tensor&, const OptionalTensor&, int64_t);
using TokenSchema = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, int64_t, at::ScalarType);
using DlogitsSchema = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t,
                                 at::ScalarType, const OptionalTensor&);

struct DifferentiableTokenLogprob : torch::autograd::Function<DifferentiableTokenLogprob> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& logits, const at::Tensor& ids,
                              const OptionalTensor& temperature, int64_t segments, at::ScalarType dtype) {
        static const auto op = typed_op<PartsSchema>("token_logprob_parts");
        check_dlogits_dtype("token_logprob", "dlogits_dtype", dtype);
        at::AutoDispatchBelowADInplaceOrView below;
        auto [logprob, row_max, exp_sum] = op.call(logits, ids, temperature, segments);
        context->save_for_backward({logits, ids, row_max, exp_sum, temperature.value_or(at::Tensor())});
        context->saved_data["dtype"] = int64_t(dtype);
        return logprob;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list grad) {
        static const auto op = typed_op<DlogitsSchema>("vocab_dlogits");
        const auto saved = context->get_saved_variables();
        const auto dtype = at::ScalarType(context->saved_data["dtype"].toInt());
        const OptionalTensor temperature = saved[4].defined() ? OptionalTensor(saved[4]) : std::nullopt;
        const at::Tensor dlogits = op.call(saved[0], saved[2], saved[3], saved[1], grad[0], saved[0].size(1), dtype, temperature);
        return {dlogits.to(at::kFloat), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};  // autograd wants the dtype of the logits
    }
};

at::Tensor token_logprob_autograd(const at::Tensor& logits, const at::Tensor& ids, const OptionalTensor& temperature, int64_t segments,
                                  at::ScalarType dtype) {
    static const auto op = typed_op<TokenSchema>("token_logprob");
    TORCH_CHECK_NOT_IMPLEMENTED(!temperature || !needs_gradient(*temperature), "token_logprob: has no gradient by the temperature; detach it");
    if (needs_gradient(logits)) return DifferentiableTokenLogprob::apply(logits, ids, temperature, segments, dtype);
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(logits, ids, temperature, segments, dtype);
}

void implement(torch::Library& library) {
    library.impl("vocab_max", &vocab_max);
    library.impl("vocab_exp_sum", &vocab_exp_sum);
    library.impl("logprob_from_parts", &logprob_from_parts);
    library.impl("vocab_dlogits", &vocab_dlogits);
    library.impl("token_logprob_parts", &token_logprob_parts);
    library.impl("token_logprob", &token_logprob);
    library.impl("log_softmax", &log_softmax);
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_FRAGMENT(megatron_ext, library) {
    library.def("vocab_max(Tensor logits, int valid, Tensor? temperature=None) -> Tensor");
    library.def("vocab_exp_sum(Tensor logits, Tensor row_max, int valid, int segments, Tensor? temperature=None) -> Tensor");
    library.def("logprob_from_parts(Tensor target_logit, Tensor row_max, Tensor exp_sum) -> Tensor");
    library.def("vocab_dlogits(Tensor logits, Tensor row_max, Tensor exp_sum, Tensor targets, Tensor grad, int valid, ScalarType dtype, "
                "Tensor? temperature=None) -> Tensor");
    library.def("token_logprob_parts(Tensor logits, Tensor ids, Tensor? temperature, int segments) -> (Tensor, Tensor, Tensor)");
    library.def("token_logprob(Tensor logits, Tensor ids, Tensor? temperature, int segments, ScalarType dlogits_dtype=float32) -> Tensor");
    library.def("log_softmax(Tensor logits, Tensor? temperature, int segments) -> Tensor");
}
TORCH_LIBRARY_IMPL(megatron_ext, Meta, library) {
    library.impl("vocab_max", &megatron_ext::vocab_max_meta);
    library.impl("vocab_exp_sum", &megatron_ext::vocab_exp_sum_meta);
    library.impl("logprob_from_parts", &megatron_ext::logprob_from_parts_meta);
    library.impl("vocab_dlogits", &megatron_ext::vocab_dlogits_meta);
    library.impl("token_logprob_parts", &megatron_ext::token_logprob_parts_meta);
    library.impl("token_logprob", &megatron_ext::token_logprob_meta);
    library.impl("log_softmax", &megatron_ext::log_softmax_meta);
}
TORCH_LIBRARY_IMPL(megatron_ext, Autograd, library) {
    library.impl("token_logprob", &megatron_ext::token_logprob_autograd);
    megatron_ext::refuse_gradients(
        library, {"vocab_max", "vocab_exp_sum", "logprob_from_parts", "vocab_dlogits", "token_logprob_parts", "log_softmax"});
}
MEGATRON_EXT_IMPLEMENT(megatron_ext::implement)
