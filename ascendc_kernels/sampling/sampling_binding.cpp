// torch.ops.megatron_ext: sample, support_mask, beam_step. Legend: T tokens, V vocabulary, B requests, W beams, k kept.
#include "binding.h"
#include "differentiable.h"
#include "logits.h"
#include "sampling_tiling.h"

namespace megatron_ext {
namespace {

constexpr int64_t kMaxColumns = 1 << 24;  // tokens of a row are counted in fp32

struct Filters {
    const OptionalTensor &top_k, &top_p, &min_p;
};

void check_columns(const char* op, const c10::SymInt& columns) {
    TORCH_CHECK_VALUE(columns <= kMaxColumns, op, ": at most ", kMaxColumns, " columns are supported (they are counted in fp32), found ", columns);
}

void check_filter(const char* name, const OptionalTensor& filter, at::ScalarType dtype, const at::Tensor& logits) {
    if (filter) check_rows("sample", name, *filter, dtype, logits);
}

void check_sample(const at::Tensor& logits, const at::Tensor& seeds, const at::Tensor& positions, const OptionalTensor& temperature,
                  const Filters& filters, int64_t segments) {
    check_logits("sample", logits);
    check_columns("sample", logits.sym_size(1));
    check_rows("sample", "seeds", seeds, at::kLong, logits);
    check_rows("sample", "positions", positions, at::kLong, logits);
    check_temperature("sample", temperature, logits);
    check_filter("top_k", filters.top_k, at::kLong, logits);
    check_filter("top_p", filters.top_p, at::kFloat, logits);
    check_filter("min_p", filters.min_p, at::kFloat, logits);
    check_segments("sample", segments, kSamplingMaxSegments);
}

// A filter as kernels read it. On a CPU its values are looked at; on a device that would wait for it.
template <typename T, typename Allowed>
at::Tensor dense_filter(const char* name, const OptionalTensor& filter, const char* wanted, Allowed allowed) {
    if (!filter) return at::Tensor();
    const at::Tensor dense = filter->contiguous();
    if (!dense.is_cpu()) return dense;
    const T* values = dense.const_data_ptr<T>();
    for (int64_t i = 0; i < dense.numel(); ++i)
        TORCH_CHECK_VALUE(allowed(values[i]), "sample: ", name, " must be ", wanted, ", found ", values[i], " at ", i);
    return dense;
}

at::Tensor dense_top_k(const OptionalTensor& top_k) {
    return dense_filter<int64_t>("top_k", top_k, "at least 0 (0 keeps all tokens)", [](int64_t k) { return k >= 0; });
}

at::Tensor dense_top_p(const OptionalTensor& top_p) {
    return dense_filter<float>("top_p", top_p, "above 0 and at most 1 (1 keeps all tokens)", [](float p) { return p > 0 && p <= 1; });
}

// The threshold that logits below the maximum are compared with.
at::Tensor log_min_p(const OptionalTensor& min_p) {
    static const auto log = typed_op<at::Tensor(const at::Tensor&)>("log");
    const at::Tensor dense = dense_filter<float>("min_p", min_p, "0 to 1 (0 keeps all tokens)", [](float p) { return p >= 0 && p <= 1; });
    return dense.defined() ? log.call(dense) : dense;
}

SamplingTiling tiling_of(const at::Tensor& logits) {
    SamplingTiling tiling{};
    tiling.rows = logits.size(0);
    tiling.columns = logits.size(1);
    tiling.row_stride = logits.stride(0);
    tiling.segments = 1;
    tiling.segment = segment_of(tiling.columns, 1);
    return tiling;
}

SamplingTiling sample_tiling(const at::Tensor& logits, int64_t segments) {
    SamplingTiling tiling = tiling_of(logits);
    tiling.segments = segments;
    tiling.segment = segment_of(tiling.columns, segments);
    const int64_t tiles = (tiling.segment + kSamplingTile - 1) / kSamplingTile * segments;
    TORCH_CHECK_VALUE(tiling.segment <= kSamplingMaxSegment && tiles <= kSamplingMaxTiles, "sample: ", tiling.columns, " columns in ", segments,
                      " segments make segments of ", tiling.segment, ", at most ", kSamplingMaxSegment,
                      " are supported (the sums of a segment's blocks have to fit into the vector core's memory); use more segments");
    return tiling;
}

int64_t row_blocks(const at::Tensor& logits) { return vector_blocks(logits.device(), logits.size(0), logits.numel()); }

at::Tensor empty_tokens(const at::Tensor& logits) { return at::empty_symint({logits.sym_size(0)}, logits.options().dtype(at::kLong)); }

std::tuple<at::Tensor, at::Tensor> sample(const at::Tensor& logits, const at::Tensor& seeds, const at::Tensor& positions,
                                          const OptionalTensor& temperature, const OptionalTensor& top_k, const OptionalTensor& top_p,
                                          const OptionalTensor& min_p, int64_t segments) {
    static const Kernel kernel("sample_f32");
    check_sample(logits, seeds, positions, temperature, {top_k, top_p, min_p}, segments);
    const at::Tensor divisor = dense_temperature("sample", temperature), k = dense_top_k(top_k), p = dense_top_p(top_p), threshold = log_min_p(min_p);
    const at::Tensor tokens = empty_tokens(logits), last = empty_tokens(logits);
    if (logits.size(0) == 0) return {tokens, last};
    const at::Tensor dense_seeds = seeds.contiguous(), dense_positions = positions.contiguous();
    SamplingTiling tiling = sample_tiling(logits, segments);
    tiling.scaled = divisor.defined();
    tiling.temperature_stride = tiling.scaled && divisor.numel() > 1;
    tiling.has_top_k = k.defined();
    tiling.has_top_p = p.defined();
    tiling.has_min_p = threshold.defined();
    kernel.run(logits.device(),
               {data(logits), optional_data(divisor), data(dense_seeds), data(dense_positions), optional_data(k), optional_data(p),
                optional_data(threshold), mutable_data(tokens), mutable_data(last)},
               &tiling, row_blocks(logits), Path::kNative);
    return {tokens, last};
}

std::tuple<at::Tensor, at::Tensor> sample_meta(const at::Tensor& logits, const at::Tensor& seeds, const at::Tensor& positions,
                                               const OptionalTensor& temperature, const OptionalTensor& top_k, const OptionalTensor& top_p,
                                               const OptionalTensor& min_p, int64_t segments) {
    check_sample(logits, seeds, positions, temperature, {top_k, top_p, min_p}, segments);
    return {empty_tokens(logits), empty_tokens(logits)};
}

void check_mask(const at::Tensor& logits, const at::Tensor& last) {
    check_logits("support_mask", logits);
    check_columns("support_mask", logits.sym_size(1));
    check_rows("support_mask", "last", last, at::kLong, logits);
}

void check_last(const at::Tensor& last, int64_t columns) {
    if (!last.is_cpu()) return;
    const int64_t* tokens = last.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < last.numel(); ++i)
        TORCH_CHECK_INDEX(tokens[i] >= -1 && tokens[i] <= columns, "support_mask: last must be in [-1, ", columns, "], found ", tokens[i], " at ", i);
}

at::Tensor support_mask_meta(const at::Tensor& logits, const at::Tensor& last) {
    check_mask(logits, last);
    return at::empty_symint(logits.sym_sizes(), logits.options().dtype(at::kBool));
}

at::Tensor support_mask(const at::Tensor& logits, const at::Tensor& last) {
    static const Kernel kernel("support_mask_f32");
    const at::Tensor mask = support_mask_meta(logits, last), dense_last = last.contiguous();
    check_last(dense_last, logits.size(1));
    if (logits.size(0) == 0) return mask;
    const SamplingTiling tiling = tiling_of(logits);
    const int64_t tiles = (tiling.columns + kSamplingTile - 1) / kSamplingTile;
    kernel.run(logits.device(), {data(logits), data(dense_last), mutable_data(mask)}, &tiling,
               vector_blocks(logits.device(), tiling.rows * tiles, logits.numel()), Path::kNative);
    return mask;
}

void check_beams(const at::Tensor& scores, const at::Tensor& logprobs, int64_t kept) {
    check_same_dtype("beam_step", "logprobs", logprobs, at::kFloat);
    check_operand("beam_step", "scores", scores, at::kFloat, logprobs.device());
    TORCH_CHECK_VALUE(logprobs.dim() == 3 && scores.dim() == 2 && scores.sym_size(0) == logprobs.sym_size(0) && scores.sym_size(1) == logprobs.sym_size(1),
                      "beam_step: scores must have shape [B, W] and logprobs [B, W, V], found ", scores.sym_sizes(), " and ", logprobs.sym_sizes());
    check_columns("beam_step", logprobs.sym_size(2));
    TORCH_CHECK_VALUE(kept >= 1 && kept <= kBeamMaxKept && logprobs.sym_size(1) * logprobs.sym_size(2) >= kept, "beam_step: kept must be 1 to ",
                      kBeamMaxKept, " and at most W x V, found ", kept, " of ", logprobs.sym_size(1), " x ", logprobs.sym_size(2));
}

using Beams = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Beams beam_step_meta(const at::Tensor& scores, const at::Tensor& logprobs, int64_t kept) {
    check_beams(scores, logprobs, kept);
    const c10::SymInt sizes[] = {scores.sym_size(0), kept};
    const at::TensorOptions ids = scores.options().dtype(at::kLong);
    return {at::empty_symint(sizes, scores.options()), at::empty_symint(sizes, ids), at::empty_symint(sizes, ids)};
}

Beams beam_step(const at::Tensor& scores, const at::Tensor& logprobs, int64_t kept) {
    static const Kernel kernel("beam_step_f32");
    Beams beams = beam_step_meta(scores, logprobs, kept);
    const auto& [kept_scores, parents, tokens] = beams;
    if (scores.size(0) == 0) return beams;
    const at::Tensor dense_scores = scores.contiguous(), dense = logprobs.contiguous();
    const BeamTiling tiling = {logprobs.size(0), logprobs.size(1), logprobs.size(2), kept};
    kernel.run(logprobs.device(), {data(dense_scores), data(dense), mutable_data(kept_scores), mutable_data(parents), mutable_data(tokens)}, &tiling,
               vector_blocks(logprobs.device(), tiling.requests, logprobs.numel()), Path::kNative);
    return beams;
}

void implement(torch::Library& library) {
    library.impl("sample", &sample);
    library.impl("support_mask", &support_mask);
    library.impl("beam_step", &beam_step);
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_FRAGMENT(megatron_ext, library) {
    library.def("sample(Tensor logits, Tensor seeds, Tensor positions, Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, "
                "int segments) -> (Tensor, Tensor)");
    library.def("support_mask(Tensor logits, Tensor last) -> Tensor");
    library.def("beam_step(Tensor scores, Tensor logprobs, int kept) -> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(megatron_ext, Meta, library) {
    library.impl("sample", &megatron_ext::sample_meta);
    library.impl("support_mask", &megatron_ext::support_mask_meta);
    library.impl("beam_step", &megatron_ext::beam_step_meta);
}
TORCH_LIBRARY_IMPL(megatron_ext, Autograd, library) {
    megatron_ext::refuse_gradients(library, {"sample", "support_mask", "beam_step"});
}
MEGATRON_EXT_IMPLEMENT(megatron_ext::implement)
