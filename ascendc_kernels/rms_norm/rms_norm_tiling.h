// Shapes of one call, shared by the binding, the kernels and their native twins.
#pragma once
#include <cstdint>

namespace megatron_ext {

// Row r of x starts at (r / inner) * outer_stride + (r % inner) * inner_stride, so that heads inside a packed QKV need no copy.
// Outputs are dense.
struct RmsNormTiling {
    int64_t rows, hidden;
    int64_t inner, outer_stride, inner_stride;
    int64_t tile_rows;     // rows in UB at a time, all of one outer index
    int64_t tile_columns;  // weight gradient: columns in UB at a time, a multiple of 64
    float eps;
};

constexpr int64_t kRmsNormMaxHidden = 7680;      // the input gradient holds 24 bytes of every column of a row in UB, and some small buffers
constexpr int64_t kRmsNormTileElements = 4096;   // elements of a tile where rows are shorter than that
constexpr int64_t kRmsNormMaxTileRows = 64;
constexpr int64_t kRmsNormMaxTileColumns = 2048;

}  // namespace megatron_ext
