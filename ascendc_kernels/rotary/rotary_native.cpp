// Native twin of rotary (reference/rope.py): one pass over memory, tables widened once per position. Legend: D size of a head, r pairs.
#include "native_call.h"
#include "parallel.h"
#include "rotary_tiling.h"

namespace megatron_ext {
namespace {

constexpr double kWorkOfElement = 4;  // an element costs about as much as so many multiply-adds of a contraction

template <typename T>
inline void rotate_halves(const T* x, const float* cos, const float* sin, Index pairs, T* y) {
#pragma GCC ivdep
    for (Index i = 0; i < pairs; ++i) {
        const float first = to_float(x[i]), second = to_float(x[pairs + i]);
        y[i] = from_float<T>(first * cos[i] - second * sin[i]);
        y[pairs + i] = from_float<T>(second * cos[i] + first * sin[i]);
    }
}

template <typename T>
inline void rotate_neighbours(const T* x, const float* cos, const float* sin, Index pairs, T* y) {
#pragma GCC ivdep
    for (Index i = 0; i < pairs; ++i) {
        const float first = to_float(x[2 * i]), second = to_float(x[2 * i + 1]);
        y[2 * i] = from_float<T>(first * cos[i] - second * sin[i]);
        y[2 * i + 1] = from_float<T>(second * cos[i] + first * sin[i]);
    }
}

// All heads of one operand at one position; y is dense.
template <typename T>
inline void rotate_position(const T* x, const float* cos, const float* sin, const RotaryTiling& tiling, const RotaryHeads& heads, T* y) {
    for (Index outer = 0; outer < heads.outer; ++outer)
        for (Index inner = 0; inner < heads.inner; ++inner, y += tiling.head_dim) {
            const T* head = x + outer * heads.outer_stride + inner * heads.inner_stride;
            if (tiling.interleaved)
                rotate_neighbours(head, cos, sin, tiling.pairs, y);
            else
                rotate_halves(head, cos, sin, tiling.pairs, y);
            std::copy(head + 2 * tiling.pairs, head + tiling.head_dim, y + 2 * tiling.pairs);
        }
}

inline Index elements_of(const RotaryTiling& tiling, const RotaryHeads& heads) { return heads.outer * heads.inner * tiling.head_dim; }

template <typename T>
void rotary(const KernelCall& call, const RotaryTiling& tiling) {
    const T* x[2] = {static_cast<const T*>(call.operands[0]), static_cast<const T*>(call.operands[1])};
    const T *cos = static_cast<const T*>(call.operands[2]), *sin = static_cast<const T*>(call.operands[3]);
    T* y[2] = {static_cast<T*>(call.operands[4]), static_cast<T*>(call.operands[5])};
    const Index elements = elements_of(tiling, tiling.heads[0]) + elements_of(tiling, tiling.heads[1]);
    parallel_ranges(tiling.positions, call.threads, kWorkOfElement * tiling.positions * elements, [&](Index first, Index last) {
        std::vector<float> tables(2 * tiling.pairs);
        float *wide_cos = tables.data(), *wide_sin = wide_cos + tiling.pairs;
        for (Index p = first; p < last; ++p) {
            for (Index i = 0; i < tiling.pairs; ++i) wide_cos[i] = to_float(cos[p * tiling.cos_stride + i]);
            for (Index i = 0; i < tiling.pairs; ++i) wide_sin[i] = to_float(sin[p * tiling.sin_stride + i]);
            for (int operand = 0; operand < 2; ++operand) {
                const RotaryHeads& heads = tiling.heads[operand];
                rotate_position(x[operand] + p * heads.position_stride, wide_cos, wide_sin, tiling, heads,
                                y[operand] + p * elements_of(tiling, heads));
            }
        }
    });
}

}  // namespace
}  // namespace megatron_ext

MEGATRON_EXT_NATIVE(rotary_bf16, megatron_ext::RotaryTiling, megatron_ext::rotary<megatron_ext::BFloat16>)
MEGATRON_EXT_NATIVE(rotary_f16, megatron_ext::RotaryTiling, megatron_ext::rotary<megatron_ext::Float16>)
