// Operands of a contraction in the segment tree, and what is done with its pieces.
#pragma once
#include "sums.h"

namespace megatron_ext {

// b(k, n), addressed through strides; one of them is 1.
template <typename T>
struct Matrix {
    const T* data;
    Index k_stride, n_stride;

    const T* at(Index k, Index n) const { return data + k * k_stride + n * n_stride; }
};

// Where the pieces of a contraction lie along k: `count` pieces of `runs` contiguous runs each. Run r of piece s begins at s * run + r * apart.
struct Pieces {
    Index count, runs, run, apart;

    Index length() const { return runs * run; }
    Index first(Index s, Index r) const { return s * run + r * apart; }
};

// Adjacent-pair tree over `count` parts, `stride` apart, of `size` values; the sum is left in the first.
inline void join(float* parts, Index count, Index stride, Index size) {
    for (Index step = 1; step < count; step *= 2)
        for (Index p = 0; p < count; p += 2 * step) {
            float* left = parts + p * stride;
            const float* right = left + step * stride;
#pragma GCC ivdep
            for (Index i = 0; i < size; ++i) left[i] = left[i] + right[i];
        }
}

// A dense matrix of results: fp32, or rounded once to T.
template <typename T>
struct Output {
    void* data;
    Index columns;
    bool rounded;

    // The rows from `row` on.
    Output from(Index row) const {
        const Index size = rounded ? Index(sizeof(T)) : Index(sizeof(float));
        return {static_cast<char*>(data) + row * columns * size, columns, rounded};
    }

    void put(Index row, Index column, const float* from, Index count) const {
        const Index at = row * columns + column;
        if (rounded)
            for (Index i = 0; i < count; ++i) static_cast<T*>(data)[at + i] = from_float<T>(from[i]);
        else
            std::copy_n(from, count, static_cast<float*>(data) + at);
    }
};

}  // namespace megatron_ext
