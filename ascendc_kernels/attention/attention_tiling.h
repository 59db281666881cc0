// Shapes of one call, shared by the bindings, the kernels and their native twins. Legend: T query rows, B sequences, D head size.
#pragma once
#include <cstdint>

#include "fractals.h"

namespace megatron_ext {

// Where key `position` of a sequence lies, in elements: page * page_stride + slot * row_stride + head * head_stride.
struct KeyStrides {
    int64_t page, row, head;
};

struct AttentionTiling {
    int64_t tokens, sequences, query_heads, key_heads, head_dim;
    int64_t q_row, q_head;  // strides of q [T, query heads, D]; out and lse are dense
    KeyStrides k, v;
    int64_t page;       // keys of a page; 0: packed, key i of a sequence is row cu_query_lens[b] + i
    int64_t max_pages;  // columns of block_tables
    int64_t kv_tile;    // keys of an online-softmax step, anchored at position 0
    int64_t kv_split;   // keys of a split, a multiple of kv_tile; 0: one split
    int64_t window;     // keys that a row sees at most, its own included; 0: all
    int64_t causal;     // 0: a row sees all keys of its sequence
    int64_t tile_rows;    // kernel: rows of a query tile, (query, head of the group) packed
    int64_t block_bytes;  // kernel: workspace of one block
    float scale;
};

constexpr int64_t kAttentionMaxHeadDim = 256;  // a tile of keys has to fit into L0B, two output tiles into L0C
constexpr int64_t kAttentionMaxTile = 128;     // keys of a tile, rows of a query tile
// Wider heads have query tiles of 64 rows instead of 128: products take half of L0C, scores the other half.
constexpr int64_t kAttentionWideHead = 128;
constexpr int64_t kAttentionMaxGroup = 64;  // query heads of a key head: all of them share a tile
// Queries and keys of a step of the backward. Key tiles of dk and dv are narrower for wide heads: both accumulators stay in L0C.
constexpr int64_t kAttentionBackwardStep = 64;
constexpr int64_t kAttentionBackwardWideHead = 128;
constexpr int64_t kAttentionBackwardAccumulators = 16384;  // fp32 elements of dq, or of dk and dv, in L0C

// For the bindings. Forward: two slots each of scores (fp32), probabilities (16 bits) and their products with the values (fp32).
inline int64_t attention_block_bytes(const AttentionTiling& tiling) {
    constexpr int64_t kWide = sizeof(float), kNarrow = 2;
    return 2 * tiling.tile_rows * (tiling.kv_tile * (kWide + kNarrow) + tiling.head_dim * kWide);
}

// Backward: two slots of s and dp (fp32) and of p and ds (16 bits), and the finished accumulators (fp32).
inline int64_t attention_backward_block_bytes() {
    constexpr int64_t kWide = sizeof(float), kNarrow = 2;
    return 4 * kAttentionBackwardStep * kAttentionBackwardStep * (kWide + kNarrow) + kAttentionBackwardAccumulators * kWide;
}

}  // namespace megatron_ext
