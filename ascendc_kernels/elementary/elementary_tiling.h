// Shapes of one call, shared by the binding, the kernels and their native twins.
#pragma once
#include <cstdint>

namespace megatron_ext {

struct ElementwiseTiling {
    int64_t size, tile;  // elements; a tile is in UB at a time, a multiple of 64
};

struct RowSumTiling {
    int64_t rows, width;
    int64_t tile_rows, tile_columns;  // in UB at a time, a multiple of 64 columns; one row where it is longer than a tile
};

constexpr int64_t kElementwiseMaxTile = 8192;  // double buffered in and out: 128 of 192 KB
constexpr int64_t kRowSumTileElements = 8192;
constexpr int64_t kRowSumMaxTileRows = 64;

}  // namespace megatron_ext
