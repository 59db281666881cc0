// Shapes of one call, shared by the binding, the kernels and their native twins.
#pragma once
#include <cstdint>

namespace megatron_ext {

// Rows of gate_up start row_stride elements apart; everything else is dense.
struct SwigluTiling {
    int64_t rows, width;  // width of the result: a row of gate_up holds twice as many, gates first
    int64_t row_stride;
    int64_t tile_rows, tile_columns;  // in UB at a time; a multiple of 16 columns
};

constexpr int64_t kSwigluTileElements = 4096;  // the gradient holds 44 bytes of each in UB: 176 of 192 KB
constexpr int64_t kSwigluMaxTileRows = 255;

}  // namespace megatron_ext
