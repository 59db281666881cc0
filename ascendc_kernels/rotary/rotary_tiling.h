// Shapes of one call, shared by the binding, the kernel and its native twin. Legend: D size of a head, r pairs that rotate (2r <= D).
#pragma once
#include <cstdint>

namespace megatron_ext {

// Heads of one operand: `outer` x `inner` of them at every position, so that heads inside a packed QKV need no copy. Strides in elements.
struct RotaryHeads {
    int64_t outer, inner;
    int64_t position_stride, outer_stride, inner_stride;
};

struct RotaryTiling {
    int64_t positions, head_dim, pairs;
    int64_t cos_stride, sin_stride;  // between the rows of the tables
    int64_t interleaved;             // pairs are (2i, 2i + 1) instead of (i, r + i)
    int64_t tile_positions, tile_heads;
    RotaryHeads heads[2];  // queries and keys; outer is 0 where there is no second operand
};

constexpr int64_t kRotaryMaxHeadDim = 1024;      // rows of a tile are at most 255 DataBlocks of fp32 apart in a vector instruction
constexpr int64_t kRotaryTileElements = 4096;    // of heads, and of tables
constexpr int64_t kRotaryMaxTileRows = 255;      // repeats of a vector instruction
constexpr int64_t kRotaryMaxTilePositions = 64;

}  // namespace megatron_ext
