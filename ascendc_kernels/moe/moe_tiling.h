// Shapes of one call, shared by the binding, the kernels and their native twins. Legend: T tokens, R rows (token copies), H hidden.
#pragma once
#include <cstdint>

namespace megatron_ext {

struct CombineTiling {
    int64_t tokens, rows, hidden;
    int64_t experts_per_segment;
    int64_t depth;         // sums of a token that wait for others at most, and the one that runs
    int64_t tile_columns;  // in UB at a time, a multiple of 64
};

struct CombineBackwardTiling {
    int64_t rows, hidden;
};

constexpr int64_t kCombineMaxDepth = 16;            // 2^15 segments of experts
constexpr int64_t kCombineMaxTileColumns = 2048;
constexpr int64_t kCombineUbElements = 24576;       // fp32 elements of all waiting sums in UB: 96 of 192 KB
constexpr int64_t kCombineBackwardTile = 4096;      // columns in UB at a time

}  // namespace megatron_ext
