// Shapes of one call, shared by the binding, the kernels and their native twins. Legend: T tokens, V vocabulary rows, H hidden.
#pragma once
#include <cstdint>

namespace megatron_ext {

struct EmbeddingTiling {
    int64_t tokens, hidden;
    int64_t tile_columns;  // in UB at a time, a multiple of 64
    int64_t owners;        // gradient: row v belongs to owner v % owners
};

constexpr int64_t kEmbeddingMaxTileColumns = 4096;  // the gradient holds 20 bytes of each in UB: 80 of 192 KB
constexpr int64_t kEmbeddingIdsTogether = 1024;     // ids in UB at a time: 8 KB
constexpr int64_t kEmbeddingTokensTogether = 16;    // lookup: tokens that a block takes at a time

}  // namespace megatron_ext
