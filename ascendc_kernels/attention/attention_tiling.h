// Shapes of one call, shared by the bindings, the kernels and their native twins. Legend: T query rows, B sequences, D head size.
#pragma once
#include <cstdint>

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
    int64_t tile_rows;  // kernel: rows of a query tile, (query, head of the group) packed
    float scale;
};

constexpr int64_t kAttentionMaxHeadDim = 256;  // a tile of keys has to fit into L0B, two output tiles into L0C
constexpr int64_t kAttentionMaxTile = 128;
constexpr int64_t kAttentionMaxStride = 65535;  // the stride of a row in Nd2NzParams has 16 bits
// Rows of a query tile: the output tile takes half of L0C (64 KB), as do the scores.
constexpr int64_t kAttentionTileElements = 128 * 128;
constexpr int64_t kAttentionMaxGroup = 64;  // query heads of a key head: all of them share a tile
// Queries and keys of a step of the backward; key tiles of dk and dv are narrower for wide heads, because both accumulators stay in L0C.
constexpr int64_t kAttentionBackwardRows = 64;
constexpr int64_t kAttentionBackwardKeyElements = 64 * 128;

// Workspace of the forward, bytes of one block: two slots each of scores, probabilities and their products with the values.
inline int64_t attention_workspace_bytes(const AttentionTiling& tiling) {
    return 2 * tiling.tile_rows * (tiling.kv_tile * (sizeof(float) + 2) + tiling.head_dim * sizeof(float));
}

// Workspace of the backward: delta of every row, then for each block two slots of s and dp (fp32), p and ds.
inline int64_t attention_backward_workspace_bytes(const AttentionTiling& tiling, int64_t blocks) {
    const int64_t step = kAttentionBackwardRows * kAttentionBackwardRows;
    const int64_t deltas = (tiling.tokens * tiling.query_heads * int64_t(sizeof(float)) + 511) / 512 * 512;
    return deltas + blocks * 2 * step * (2 * int64_t(sizeof(float)) + 2 * 2);
}

}  // namespace megatron_ext
