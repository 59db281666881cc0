// Native twins of the kernels of this folder (reference/norm.py). A row is widened once and stays in the nearest cache. Legend: H hidden.
#include "native_call.h"
#include "parallel.h"
#include "row_sums.h"
#include "rms_norm_tiling.h"

namespace megatron_ext {
namespace {

constexpr double kWorkOfElement = 8;  // an element costs about as much as so many multiply-adds of a contraction

inline Index source(const RmsNormTiling& tiling, Index row) {
    return row / tiling.inner * tiling.outer_stride + row % tiling.inner * tiling.inner_stride;
}

template <typename T>
inline void widen(const T* from, float* to, Index count) {
    for (Index i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

// Rows in fp32 are whole blocks of a row sum; what lies beyond the row is zero.
inline Index padded(const RmsNormTiling& tiling) { return round_up(tiling.hidden, kRowSumBlock); }

// The row sum of products of a and b, both padded.
inline float dot(const float* a, const float* b, const RmsNormTiling& tiling) {
    return sum_of_blocks(padded(tiling), [=](Index i, Lanes* v) {
        for (Index j = 0; j < kTogether; ++j) v[j] = load(a + i + j * kLanes) * load(b + i + j * kLanes);
    });
}

inline float inverse_rms(const float* x, const RmsNormTiling& tiling) {
    const float sum = dot(x, x, tiling);
    return 1.0f / std::sqrt(sum / float(tiling.hidden) + tiling.eps);
}

template <typename T>
inline void normalise(const float* x, const float* weight, T* y, const RmsNormTiling& tiling) {
    const float rstd = inverse_rms(x, tiling);
    for (Index i = 0; i < tiling.hidden; ++i) y[i] = from_float<T>(to_float(from_float<T>(x[i] * rstd)) * weight[i]);
}

// body(first, last, room of `rows` padded rows, all zero) over ranges of rows.
template <typename Body>
inline void over_rows(const KernelCall& call, const RmsNormTiling& tiling, Index rows, Body body) {
    parallel_ranges(tiling.rows, call.threads, kWorkOfElement * tiling.rows * tiling.hidden, [&](Index first, Index last) {
        std::vector<float> room(rows * padded(tiling));
        body(first, last, room.data());
    });
}

template <typename T>
void rms_norm(const KernelCall& call, const RmsNormTiling& tiling) {
    const T *x = static_cast<const T*>(call.operands[0]), *weight = static_cast<const T*>(call.operands[1]);
    T* y = static_cast<T*>(call.operands[2]);
    over_rows(call, tiling, 2, [=](Index first, Index last, float* room) {
        float* wide_weight = room + padded(tiling);
        widen(weight, wide_weight, tiling.hidden);
        for (Index row = first; row < last; ++row) {
            widen(x + source(tiling, row), room, tiling.hidden);
            normalise(room, wide_weight, y + row * tiling.hidden, tiling);
        }
    });
}

template <typename T>
void add_rms_norm(const KernelCall& call, const RmsNormTiling& tiling) {
    const T *x = static_cast<const T*>(call.operands[0]), *residual = static_cast<const T*>(call.operands[1]);
    const T* weight = static_cast<const T*>(call.operands[2]);
    T *y = static_cast<T*>(call.operands[3]), *sum = static_cast<T*>(call.operands[4]);
    over_rows(call, tiling, 2, [=](Index first, Index last, float* room) {
        float* wide_weight = room + padded(tiling);
        widen(weight, wide_weight, tiling.hidden);
        for (Index row = first; row < last; ++row) {
            const T *a = x + source(tiling, row), *b = residual + row * tiling.hidden;
            T* total = sum + row * tiling.hidden;
            for (Index i = 0; i < tiling.hidden; ++i) total[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));
            widen(total, room, tiling.hidden);
            normalise(room, wide_weight, y + row * tiling.hidden, tiling);
        }
    });
}

template <typename T>
void rms_norm_dx(const KernelCall& call, const RmsNormTiling& tiling) {
    const T *dy = static_cast<const T*>(call.operands[0]), *x = static_cast<const T*>(call.operands[1]);
    const T* weight = static_cast<const T*>(call.operands[2]);
    T* dx = static_cast<T*>(call.operands[3]);
    float* rstds = static_cast<float*>(call.operands[4]);
    over_rows(call, tiling, 3, [=](Index first, Index last, float* room) {
        const Index h = tiling.hidden;
        float *xhat = room, *dxhat = room + padded(tiling), *wide_weight = room + 2 * padded(tiling);
        widen(weight, wide_weight, h);
        for (Index row = first; row < last; ++row) {
            const T *gradient = dy + row * h, *input = x + source(tiling, row);
            T* out = dx + row * h;
            widen(input, xhat, h);
            const float rstd = rstds[row] = inverse_rms(xhat, tiling);
            for (Index i = 0; i < h; ++i) xhat[i] = xhat[i] * rstd;
            for (Index i = 0; i < h; ++i) dxhat[i] = to_float(gradient[i]) * wide_weight[i];
            const float mean = dot(dxhat, xhat, tiling) / float(h);
            for (Index i = 0; i < h; ++i) out[i] = from_float<T>((dxhat[i] - xhat[i] * mean) * rstd);
        }
    });
}

// A thread owns columns and runs through all rows in order.
template <typename T>
void rms_norm_dw(const KernelCall& call, const RmsNormTiling& tiling) {
    const T *dy = static_cast<const T*>(call.operands[0]), *x = static_cast<const T*>(call.operands[1]);
    const float* rstds = static_cast<const float*>(call.operands[2]);
    float* dw = static_cast<float*>(call.operands[3]);
    parallel_ranges(tiling.hidden, call.threads, kWorkOfElement * tiling.rows * tiling.hidden, [=](Index first, Index last) {
        for (Index row = 0; row < tiling.rows; ++row) {
            const T *gradient = dy + row * tiling.hidden, *input = x + source(tiling, row);
            const float rstd = rstds[row];
#pragma GCC ivdep
            for (Index i = first; i < last; ++i) dw[i] = dw[i] + to_float(gradient[i]) * to_float(from_float<T>(to_float(input[i]) * rstd));
        }
    });
}

}  // namespace
}  // namespace megatron_ext

#define RMS_NORM_NATIVE(name)                                                                                       \
    MEGATRON_EXT_NATIVE(name##_bf16, megatron_ext::RmsNormTiling, megatron_ext::name<megatron_ext::BFloat16>)       \
    MEGATRON_EXT_NATIVE(name##_f16, megatron_ext::RmsNormTiling, megatron_ext::name<megatron_ext::Float16>)
RMS_NORM_NATIVE(rms_norm)
RMS_NORM_NATIVE(add_rms_norm)
RMS_NORM_NATIVE(rms_norm_dx)
RMS_NORM_NATIVE(rms_norm_dw)
