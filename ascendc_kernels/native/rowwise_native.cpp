// Operators on independent rows: RMSNorm, SwiGLU, exp, log, row sums, vocabulary sums, embedding gradient
// (reference/{norm,activation,elementary,sums,logprob,embedding}.py).
#include "dispatch.h"
#include "sums.h"

namespace megatron_ext {
namespace {

template <typename T>
void swiglu(const T* gate_up, T* out, Index rows, Index width) {
    for (Index t = 0; t < rows; ++t, gate_up += 2 * width, out += width)
        for (Index i = 0; i < width; ++i) {
            const float gate = to_float(gate_up[i]), up = to_float(gate_up[width + i]);
            out[i] = from_float<T>(gate / (exp_f32(-gate) + 1.0f) * up);
        }
}

template <typename T>
void swiglu_backward(const T* da, const T* gate_up, T* out, Index rows, Index width) {
    for (Index t = 0; t < rows; ++t, da += width, gate_up += 2 * width, out += 2 * width)
        for (Index i = 0; i < width; ++i) {
            const float gate = to_float(gate_up[i]), up = to_float(gate_up[width + i]), d = to_float(da[i]);
            const float denominator = exp_f32(-gate) + 1.0f, sigmoid = 1.0f / denominator;
            out[i] = from_float<T>(d * up * (sigmoid * (1.0f + gate * (1.0f - sigmoid))));
            out[width + i] = from_float<T>(d * (gate / denominator));
        }
}

// Rows with a negative id belong to another rank.
template <typename T>
void embedding_wgrad(float* grad, const Index* ids, const T* dy, Index rows, Index h) {
    for (Index t = 0; t < rows; ++t, dy += h)
        if (ids[t] >= 0)
            for (Index i = 0; i < h; ++i) grad[ids[t] * h + i] = grad[ids[t] * h + i] + to_float(dy[i]);
}

float vocab_exp_sum(const float* logits, float row_max, Index columns, Index valid, Index segments) {
    std::vector<float> parts(segments);
    const Index length = columns / segments;
    for (Index s = 0; s < segments; ++s)
        parts[s] = row_sum(length, [&](Index i) {
            const Index column = s * length + i;
            return column < valid ? exp_f32(logits[column] - row_max) : 0.0f;
        });
    return pair_tree(parts.data(), segments);
}

}  // namespace
}  // namespace megatron_ext

using namespace megatron_ext;

extern "C" __attribute__((visibility("default"))) int32_t megatron_ext_exp(const float* x, float* out, Index n) {
    for (Index i = 0; i < n; ++i) out[i] = exp_f32(x[i]);
    return 0;
}

extern "C" __attribute__((visibility("default"))) int32_t megatron_ext_log(const float* x, float* out, Index n) {
    for (Index i = 0; i < n; ++i) out[i] = log_f32(x[i]);
    return 0;
}

extern "C" __attribute__((visibility("default"))) int32_t megatron_ext_row_sum(const float* x, float* out, Index rows, Index n) {
    for (Index t = 0; t < rows; ++t) out[t] = row_sum(n, [&](Index i) { return x[t * n + i]; });
    return 0;
}

extern "C" __attribute__((visibility("default"))) int32_t megatron_ext_swiglu(int32_t dtype, const void* gate_up, void* out, Index rows, Index width) {
    return dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        swiglu(static_cast<const T*>(gate_up), static_cast<T*>(out), rows, width);
    });
}

extern "C" __attribute__((visibility("default"))) int32_t megatron_ext_swiglu_backward(int32_t dtype, const void* da, const void* gate_up, void* out, Index rows, Index width) {
    return dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        swiglu_backward(static_cast<const T*>(da), static_cast<const T*>(gate_up), static_cast<T*>(out), rows, width);
    });
}

extern "C" __attribute__((visibility("default"))) int32_t megatron_ext_vocab_exp_sum(const float* logits, const float* row_max, float* out, Index rows, Index columns, Index valid,
                                           Index segments) {
    for (Index t = 0; t < rows; ++t) out[t] = vocab_exp_sum(logits + t * columns, row_max[t], columns, valid, segments);
    return 0;
}

extern "C" __attribute__((visibility("default"))) int32_t megatron_ext_embedding_wgrad(int32_t dtype, float* grad, const Index* ids, const void* dy, Index rows, Index h) {
    return dispatch(dtype, [&](auto tag) { embedding_wgrad(grad, ids, static_cast<const decltype(tag)*>(dy), rows, h); });
}
