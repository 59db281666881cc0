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
constexpr int64_t kAttentionMaxTile = 128;     // keys of a tile, rows of a query tile
constexpr int64_t kAttentionMaxStride = 65535;  // the stride of a row in Nd2NzParams has 16 bits
constexpr int64_t kAttentionWideHead = 128;  // wider heads have query tiles of 64 rows instead of 128: products take half of L0C, scores the other half
constexpr int64_t kAttentionMaxGroup = 64;  // query heads of a key head: all of them share a tile
// Queries and keys of a step of the backward. Key tiles of dk and dv are narrower for wide heads: both accumulators stay in L0C.
constexpr int64_t kAttentionBackwardStep = 64;
constexpr int64_t kAttentionBackwardWideHead = 128;
constexpr int64_t kAttentionBackwardAccumulators = 16384;  // fp32 elements of dq, or of dk and dv, in L0C
constexpr int64_t kAttentionBackwardAlign = 512;

// Workspace of the forward, bytes of one block: two slots each of scores, probabilities and their products with the values.
inline int64_t attention_workspace_bytes(const AttentionTiling& tiling) {
    return 2 * tiling.tile_rows * (tiling.kv_tile * (sizeof(float) + 2) + tiling.head_dim * sizeof(float));
}

// Workspace of the backward: delta of every row, then for each block two slots of s and dp (fp32) and of p and ds (16 bits), and the finished
// accumulators.
inline int64_t attention_backward_delta_bytes(const AttentionTiling& tiling) {
    return (tiling.tokens * tiling.query_heads * int64_t(sizeof(float)) + kAttentionBackwardAlign - 1) / kAttentionBackwardAlign * kAttentionBackwardAlign;
}

inline int64_t attention_backward_block_bytes() {
    const int64_t step = kAttentionBackwardStep * kAttentionBackwardStep;
    return 2 * step * 2 * int64_t(sizeof(float) + 2) + kAttentionBackwardAccumulators * int64_t(sizeof(float));
}

}  // namespace megatron_ext
