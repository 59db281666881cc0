// Native twin of rotary (reference/rope.py): one pass over memory, tables widened once per position. Legend: D size of a head, r pairs.
#include "native_call.h"
#include "parallel.h"
#include "rotary_tiling.h"

namespace megatron_ext {
namespace {

constexpr double kWorkOfElement = 4;  // an element costs about as much as so many multiply-adds of a contraction

// Two neighbours as one word: loads and stores of 32 bits need no shuffles between lanes.
typedef uint32_t Word __attribute__((aligned(2), may_alias));

template <typename T>
inline float low(uint32_t word) {
    return to_float(T{uint16_t(word)});
}
template <typename T>
inline float high(uint32_t word) {
    return to_float(T{uint16_t(word >> 16)});
}
template <typename T>
inline uint32_t word_of(float low, float high) {
    return uint32_t(from_float<T>(low).bits) | uint32_t(from_float<T>(high).bits) << 16;
}

// One position's rows of the tables in fp32: all entries, or even ones before odd ones, as the words of halves need them.
class Tables {
 public:
    explicit Tables(const RotaryTiling& tiling) : pairs_(tiling.pairs), split_(!tiling.interleaved), room_(2 * tiling.pairs) {}

    template <typename T>
    void widen(const T* cos, const T* sin) {
        widen(cos, room_.data());
        widen(sin, room_.data() + pairs_);
    }

    const float* cos(bool odd = false) const { return room_.data() + (odd ? (pairs_ + 1) / 2 : 0); }
    const float* sin(bool odd = false) const { return cos(odd) + pairs_; }

 private:
    const Index pairs_;
    const bool split_;
    std::vector<float> room_;

    template <typename T>
    void widen(const T* from, float* to) const {
        const Index odd = (pairs_ + 1) / 2;
        for (Index i = 0; i < pairs_; ++i) to[!split_ ? i : i % 2 ? odd + i / 2 : i / 2] = to_float(from[i]);
    }
};

template <typename T>
inline void rotate_halves(const T* x, const Tables& tables, Index pairs, T* y) {
    const Word *x_first = reinterpret_cast<const Word*>(x), *x_second = reinterpret_cast<const Word*>(x + pairs);
    Word *y_first = reinterpret_cast<Word*>(y), *y_second = reinterpret_cast<Word*>(y + pairs);
    const float *cos = tables.cos(), *odd_cos = tables.cos(true), *sin = tables.sin(), *odd_sin = tables.sin(true);
#pragma GCC ivdep
    for (Index i = 0; i < pairs / 2; ++i) {
        const float a = low<T>(x_first[i]), b = low<T>(x_second[i]), odd_a = high<T>(x_first[i]), odd_b = high<T>(x_second[i]);
        y_first[i] = word_of<T>(a * cos[i] - b * sin[i], odd_a * odd_cos[i] - odd_b * odd_sin[i]);
        y_second[i] = word_of<T>(b * cos[i] + a * sin[i], odd_b * odd_cos[i] + odd_a * odd_sin[i]);
    }
    if (pairs % 2 == 0) return;
    const Index last = pairs - 1;
    const float a = to_float(x[last]), b = to_float(x[pairs + last]);
    y[last] = from_float<T>(a * cos[last / 2] - b * sin[last / 2]);
    y[pairs + last] = from_float<T>(b * cos[last / 2] + a * sin[last / 2]);
}

template <typename T>
inline void rotate_neighbours(const T* x, const Tables& tables, Index pairs, T* y) {
    const Word* x_pairs = reinterpret_cast<const Word*>(x);
    Word* y_pairs = reinterpret_cast<Word*>(y);
    const float *cos = tables.cos(), *sin = tables.sin();
#pragma GCC ivdep
    for (Index i = 0; i < pairs; ++i) {
        const float a = low<T>(x_pairs[i]), b = high<T>(x_pairs[i]);
        y_pairs[i] = word_of<T>(a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]);
    }
}

// All heads of one operand at one position; y is dense.
template <typename T>
inline void rotate_position(const T* x, const Tables& tables, const RotaryTiling& tiling, const RotaryHeads& heads, T* y) {
    for (Index outer = 0; outer < heads.outer; ++outer)
        for (Index inner = 0; inner < heads.inner; ++inner, y += tiling.head_dim) {
            const T* head = x + outer * heads.outer_stride + inner * heads.inner_stride;
            if (tiling.interleaved)
                rotate_neighbours(head, tables, tiling.pairs, y);
            else
                rotate_halves(head, tables, tiling.pairs, y);
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
        Tables tables(tiling);
        for (Index p = first; p < last; ++p) {
            tables.widen(cos + p * tiling.cos_stride, sin + p * tiling.sin_stride);
            for (int operand = 0; operand < 2; ++operand) {
                const RotaryHeads& heads = tiling.heads[operand];
                rotate_position(x[operand] + p * heads.position_stride, tables, tiling, heads, y[operand] + p * elements_of(tiling, heads));
            }
        }
    });
}

}  // namespace
}  // namespace megatron_ext

MEGATRON_EXT_NATIVE(rotary_bf16, megatron_ext::RotaryTiling, megatron_ext::rotary<megatron_ext::BFloat16>)
MEGATRON_EXT_NATIVE(rotary_f16, megatron_ext::RotaryTiling, megatron_ext::rotary<megatron_ext::Float16>)
