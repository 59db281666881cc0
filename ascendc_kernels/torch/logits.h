// Operands of the operators on logits: fp32 [T, V], what there is one of for each row, temperatures.
#pragma once
#include <limits>
#include <optional>

#include "binding.h"

namespace megatron_ext {

using OptionalTensor = std::optional<at::Tensor>;

constexpr int64_t kFractal = MEGATRON_EXT_FRACTAL;

inline void check_logits(const char* op, const at::Tensor& logits) {
    check_same_dtype(op, "logits", logits, at::kFloat);
    TORCH_CHECK_VALUE(logits.dim() == 2 && logits.sym_size(1) >= 1, op, ": logits must have shape [T, V], found ", logits.sym_sizes());
    TORCH_CHECK_VALUE(logits.sym_stride(1) == 1 || logits.sym_size(1) == 1, op, ": the columns of a row must lie side by side, found strides ",
                      logits.sym_strides(), " (a copy of the logits is what this operator avoids; make one by .contiguous())");
}

// fp32 or int64 [T], one value a row.
inline void check_rows(const char* op, const char* name, const at::Tensor& tensor, at::ScalarType dtype, const at::Tensor& logits) {
    check_operand(op, name, tensor, dtype, logits.device());
    TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.sym_size(0) == logits.sym_size(0), op, ": ", name, " must have shape [", logits.sym_size(0),
                      "], one value for each row of logits, found ", tensor.sym_sizes());
}

inline void check_temperature(const char* op, const OptionalTensor& temperature, const at::Tensor& logits) {
    if (!temperature) return;
    check_operand(op, "temperature", *temperature, at::kFloat, logits.device());
    TORCH_CHECK_VALUE(temperature->dim() <= 1 && (temperature->sym_numel() == 1 || temperature->sym_numel() == logits.sym_size(0)), op,
                      ": temperature must hold one value or [", logits.sym_size(0), "], one for each row of logits, found shape ",
                      temperature->sym_sizes());
}

inline void check_segments(const char* op, int64_t segments, int64_t most) {
    TORCH_CHECK_VALUE(segments >= 1 && (segments & (segments - 1)) == 0 && segments <= most, op, ": segments must be a power of two, at most ", most,
                      ", found ", segments);
}

// A temperature as kernels read it. On a CPU its values are looked at; on a device that would wait for it.
inline at::Tensor dense_temperature(const char* op, const OptionalTensor& temperature) {
    if (!temperature) return at::Tensor();
    const at::Tensor dense = temperature->contiguous();
    if (!dense.is_cpu()) return dense;
    const float* values = dense.const_data_ptr<float>();
    for (int64_t i = 0; i < dense.numel(); ++i)
        TORCH_CHECK_VALUE(values[i] > 0 && values[i] <= std::numeric_limits<float>::max(), op, ": temperature must be positive and finite, found ",
                          values[i], " at ", i, " (greedy sampling needs no temperature)");
    return dense;
}

inline const void* optional_data(const at::Tensor& tensor) { return tensor.defined() ? data(tensor) : nullptr; }

// Columns of a segment: V rounded up to segments of whole fractals, as the padded vocabulary of all ranks is.
inline int64_t segment_of(int64_t columns, int64_t segments) { return (columns + kFractal * segments - 1) / (kFractal * segments) * kFractal; }

}  // namespace megatron_ext
