// Operators on independent rows: RMSNorm, SwiGLU, exp, log, row sums, vocabulary sums, embedding gradient
// (reference/{norm,activation,elementary,sums,logprob,embedding}.py).
#include "dispatch.h"
#include "sums.h"

namespace megatron_ext {
namespace {

template <typename T>
float inverse_rms(const T* x, Index h, float eps) {
    const float sum = row_sum(h, [&](Index i) { return to_float(x[i]) * to_float(x[i]); });
    return 1.0f / std::sqrt(sum / float(h) + eps);
}

template <typename T>
void rms_norm(const T* x, const T* w, T* out, Index rows, Index h, float eps) {
    for (Index t = 0; t < rows; ++t, x += h, out += h) {
        const float rstd = inverse_rms(x, h, eps);
        for (Index i = 0; i < h; ++i)
            out[i] = from_float<T>(to_float(from_float<T>(to_float(x[i]) * rstd)) * to_float(w[i]));
    }
}

template <typename T>
void rms_norm_backward(const T* dy, const T* x, const T* w, T* dx, float* dw, Index rows, Index h, float eps) {
    for (Index t = 0; t < rows; ++t, dy += h, x += h, dx += h) {
        const float rstd = inverse_rms(x, h, eps);
        const float sum = row_sum(h, [&](Index i) { return (to_float(dy[i]) * to_float(w[i])) * (to_float(x[i]) * rstd); });
        const float mean = sum / float(h);
        for (Index i = 0; i < h; ++i) {
            const float xhat = to_float(x[i]) * rstd;
            dx[i] = from_float<T>((to_float(dy[i]) * to_float(w[i]) - xhat * mean) * rstd);
            dw[i] = dw[i] + to_float(dy[i]) * to_float(from_float<T>(xhat));
        }
    }
}

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

extern "C" __attribute__((visibility("default"))) int32_t megatron_ext_rms_norm(int32_t dtype, const void* x, const void* w, void* out, Index rows, Index h, float eps) {
    return dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        rms_norm(static_cast<const T*>(x), static_cast<const T*>(w), static_cast<T*>(out), rows, h, eps);
    });
}

extern "C" __attribute__((visibility("default"))) int32_t megatron_ext_rms_norm_backward(int32_t dtype, const void* dy, const void* x, const void* w, void* dx, float* dw,
                                                  Index rows, Index h, float eps) {
    return dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        rms_norm_backward(static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<const T*>(w), static_cast<T*>(dx), dw, rows, h,
                          eps);
    });
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
