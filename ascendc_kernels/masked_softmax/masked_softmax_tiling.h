// Shapes of one call, shared by the binding, the kernels and their native twins.
#pragma once
#include <cstdint>

namespace megatron_ext {

// Rows are dense. Row r is query r % queries of (r / queries % inner) of r / queries / inner; the mask has its own stride, in bytes, for each of the
// three, 0 where it is broadcast.
struct MaskedSoftmaxTiling {
    int64_t rows, keys;
    int64_t queries, inner;
    int64_t query_stride, inner_stride, outer_stride;
    float scale;
    bool causal, masked;
};

constexpr int64_t kMaskedSoftmaxTile = 4096;  // keys in UB at a time, a multiple of 128; longer rows are read once for each of three passes

}  // namespace megatron_ext
