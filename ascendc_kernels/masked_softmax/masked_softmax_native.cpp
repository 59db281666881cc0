// Native twins of the kernels of this folder (reference/softmax.py). A row is widened once and stays in the nearest cache.
#include "masked_softmax_tiling.h"
#include "native_call.h"
#include "parallel.h"
#include "softmax.h"
#include "widen.h"

namespace megatron_ext {
namespace {

constexpr double kWorkOfElement = 16;  // an element costs about as much as so many multiply-adds of a contraction
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// body(row, room of `rows` rows of K floats, each rounded up to whole blocks) over all rows.
template <typename Body>
inline void over_rows(const KernelCall& call, const MaskedSoftmaxTiling& tiling, Index rows, Body body) {
    parallel_ranges(tiling.rows, call.threads, kWorkOfElement * tiling.rows * tiling.keys, [&](Index first, Index last) {
        const std::unique_ptr<float[]> space = room(rows * round_up(tiling.keys, kRowSumBlock));
        for (Index row = first; row < last; ++row) body(row, space.get());
    });
}

// Keys that the query of a row sees.
inline Index visible_keys(const MaskedSoftmaxTiling& tiling, Index row) {
    if (!tiling.causal) return tiling.keys;
    return std::max<Index>(0, row % tiling.queries + tiling.keys - tiling.queries + 1);
}

inline const uint8_t* mask_row(const MaskedSoftmaxTiling& tiling, const uint8_t* mask, Index row) {
    const Index outer = row / tiling.queries;
    const Index inner = outer % tiling.inner * tiling.inner_stride + outer / tiling.inner * tiling.outer_stride;
    return mask + row % tiling.queries * tiling.query_stride + inner;
}

// room = exp(room - max), whose sum is returned; lanes up to a whole block hold -inf, whose exponent is +0.
inline float exponents(float* room, float row_max, Index count) {
    const Index padded = round_up(count, kRowSumBlock);
    const Lanes maxima = splat(row_max);
    std::fill(room + count, room + padded, -kInfinity);
    return sum_of_blocks(padded, [=](Index i, Lanes* v) {
        for (Index j = 0; j < kTogether; ++j) v[j] = load(room + i + j * kLanes) - maxima;
        exp_below_zero(v);
        for (Index j = 0; j < kTogether; ++j) store(room + i + j * kLanes, v[j]);
    });
}

// A row without a finite maximum: masked lanes are +0, the others NaN, as (x - max) of infinities and NaN is.
template <typename T>
inline void without_maximum(const uint8_t* mask, T* y, Index count) {
    for (Index i = 0; i < count; ++i) y[i] = from_float<T>(mask && mask[i] ? 0.0f : std::numeric_limits<float>::quiet_NaN());
}

template <typename T>
void masked_softmax(const KernelCall& call, const MaskedSoftmaxTiling& tiling) {
    const T* input = static_cast<const T*>(call.operands[0]);
    const uint8_t* masks = static_cast<const uint8_t*>(call.operands[1]);
    T* output = static_cast<T*>(call.operands[2]);
    over_rows(call, tiling, 1, [=](Index row, float* room) {
        const T* x = input + row * tiling.keys;
        T* y = output + row * tiling.keys;
        const uint8_t* mask = tiling.masked ? mask_row(tiling, masks, row) : nullptr;
        const Index count = visible_keys(tiling, row);
        std::fill(y + count, y + tiling.keys, from_float<T>(0.0f));
        if (count == 0) return;
        for (Index i = 0; i < count; ++i) room[i] = to_float(x[i]) * tiling.scale;
        if (mask)
            for (Index i = 0; i < count; ++i) room[i] = mask[i] ? -kInfinity : room[i];
        const float row_max = maximum(room, count);
        if (!(row_max > -kInfinity && row_max < kInfinity)) return without_maximum(mask, y, count);
        const float sum = exponents(room, row_max, count);
        for (Index i = 0; i < count; ++i) y[i] = from_float<T>(room[i] / sum);
    });
}

template <typename T>
void masked_softmax_backward(const KernelCall& call, const MaskedSoftmaxTiling& tiling) {
    const T *gradient = static_cast<const T*>(call.operands[0]), *forward = static_cast<const T*>(call.operands[1]);
    T* result = static_cast<T*>(call.operands[2]);
    const Index keys = tiling.keys, padded = round_up(keys, kRowSumBlock);
    over_rows(call, tiling, 2, [=](Index row, float* p) {
        const T *dp_row = gradient + row * keys, *p_row = forward + row * keys;
        T* dx = result + row * keys;
        float* dp = p + padded;
        for (Index i = 0; i < keys; ++i) p[i] = to_float(p_row[i]);
        for (Index i = 0; i < keys; ++i) dp[i] = to_float(dp_row[i]);
        std::fill(p + keys, p + padded, 0.0f);
        std::fill(dp + keys, dp + padded, 0.0f);
        const float dot = sum_of_blocks(padded, [=](Index i, Lanes* v) {
            for (Index j = 0; j < kTogether; ++j) {
                const Lanes weight = load(p + i + j * kLanes);
                v[j] = weight == 0.0f ? splat(0.0f) : weight * load(dp + i + j * kLanes);
            }
        });
        const float scale = tiling.scale;
#pragma GCC ivdep
        for (Index i = 0; i < keys; ++i) {
            const float everywhere = p[i] * (dp[i] - dot) * scale;  // computed where p is 0 as well: no branch
            dx[i] = from_float<T>(p[i] == 0.0f ? 0.0f : everywhere);
        }
    });
}

}  // namespace
}  // namespace megatron_ext

#define MASKED_SOFTMAX_NATIVE(suffix, T)                                                                                               \
    MEGATRON_EXT_NATIVE(masked_softmax_##suffix, megatron_ext::MaskedSoftmaxTiling, megatron_ext::masked_softmax<T>)                   \
    MEGATRON_EXT_NATIVE(masked_softmax_backward_##suffix, megatron_ext::MaskedSoftmaxTiling, megatron_ext::masked_softmax_backward<T>)
MASKED_SOFTMAX_NATIVE(f32, float)
MASKED_SOFTMAX_NATIVE(bf16, megatron_ext::BFloat16)
MASKED_SOFTMAX_NATIVE(f16, megatron_ext::Float16)
