// The orders of addition, with the bits of reference/sums.py. Lanes of a vector are always distinct results, so that no
// instruction set can change an order.
#pragma once
#include <algorithm>
#include <vector>

#include "elementary.h"

namespace megatron_ext {

using Index = int64_t;
constexpr Index kFractal = MEGATRON_EXT_FRACTAL;            // set by ascendc_kernels/build.py
constexpr Index kRowSumBlock = MEGATRON_EXT_ROW_SUM_BLOCK;  // set by ascendc_kernels/build.py
constexpr Index kPanel = 16;          // columns computed together; no order depends on it
enum MmadOrder : int32_t { kSequential = 0, kGroups16 = 1 };

typedef float Lanes __attribute__((vector_size(32), aligned(4), may_alias));
constexpr Index kLanes = 8;

// Not memcpy: compilers keep its target in memory.
inline Lanes load(const float* from) { return *reinterpret_cast<const Lanes*>(from); }
inline void store(float* to, Lanes value) { *reinterpret_cast<Lanes*>(to) = value; }

inline Index round_up(Index n, Index multiple) { return (n + multiple - 1) / multiple * multiple; }

// Adjacent-pair tree over count (a power of two) values; overwrites them.
inline float pair_tree(float* values, Index count) {
    for (; count > 1; count /= 2)
        for (Index i = 0; i < count / 2; ++i) values[i] = values[2 * i] + values[2 * i + 1];
    return values[0];
}

// get(i) gives term i. Blocks of 64: a tree inside, blocks one after another from +0.
template <typename Get>
inline float row_sum(Index n, Get get) {
    float total = 0.0f, block[kRowSumBlock];
    for (Index first = 0; first < n; first += kRowSumBlock) {
        const Index count = std::min(kRowSumBlock, n - first);
        for (Index i = 0; i < count; ++i) block[i] = get(first + i);
        for (Index i = count; i < kRowSumBlock; ++i) block[i] = 0.0f;
        total = total + pair_tree(block, kRowSumBlock);
    }
    return total;
}

// What fits a register: without AVX, compilers keep vectors of 32 bytes in memory.
#ifdef __AVX__
typedef Lanes Register;
#else
typedef float Register __attribute__((vector_size(16), aligned(4), may_alias));
#endif
constexpr Index kWidth = sizeof(Register) / sizeof(float), kRegisters = kPanel / kWidth;

inline Register load_register(const float* from) { return *reinterpret_cast<const Register*>(from); }
inline void store_register(float* to, Register value) { *reinterpret_cast<Register*>(to) = value; }

struct MultiplyThenAdd {
    Register operator()(float a, Register b, Register c) const { return c + a * b; }
};

// c[Rows][16] += a[Rows][L] x panel[L][16]; L is padded with zeros to a multiple of 16.
template <int Rows, typename MultiplyAdd = MultiplyThenAdd>
inline void contract_block_sequential(const float* a, Index a_stride, const float* panel, Index length, float* c, Index c_stride,
                                      MultiplyAdd multiply_add = {}) {
    Register acc[Rows][kRegisters];
    for (int r = 0; r < Rows; ++r)
        for (int h = 0; h < kRegisters; ++h) acc[r][h] = load_register(c + r * c_stride + h * kWidth);
    for (Index k = 0; k < length; ++k) {
        Register b[kRegisters];
        for (int h = 0; h < kRegisters; ++h) b[h] = load_register(panel + k * kPanel + h * kWidth);
        for (int r = 0; r < Rows; ++r)
            for (int h = 0; h < kRegisters; ++h) acc[r][h] = multiply_add(a[r * a_stride + k], b[h], acc[r][h]);
    }
    for (int r = 0; r < Rows; ++r)
        for (int h = 0; h < kRegisters; ++h) store_register(c + r * c_stride + h * kWidth, acc[r][h]);
}

template <int Rows>
inline void contract_block_groups16(const float* a, Index a_stride, const float* panel, Index length, float* c, Index c_stride) {
    for (int r = 0; r < Rows; ++r)
        for (int h = 0; h < kRegisters; ++h) {
            Register acc = load_register(c + r * c_stride + h * kWidth), tree[kFractal];
            for (Index first = 0; first < length; first += kFractal) {
                for (Index i = 0; i < kFractal; ++i) tree[i] = a[r * a_stride + first + i] * load_register(panel + (first + i) * kPanel + h * kWidth);
                for (Index count = kFractal / 2; count > 0; count /= 2)
                    for (Index i = 0; i < count; ++i) tree[i] = tree[2 * i] + tree[2 * i + 1];
                acc = acc + tree[0];
            }
            store_register(c + r * c_stride + h * kWidth, acc);
        }
}

}  // namespace megatron_ext
