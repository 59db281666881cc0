// Shapes of one call, shared by the binding, the kernel and its native twin.
#pragma once
#include <cstdint>

namespace megatron_ext {

struct OrderedSumTiling {
    int64_t parts;  // a power of two
    int64_t size;   // elements of one part
    int64_t tile;   // elements of one part that are in UB at a time, a multiple of 64
};

constexpr int64_t kOrderedSumMaxParts = 256;      // a tile of 64 elements of every part has to fit into UB
constexpr int64_t kOrderedSumUbElements = 16384;  // fp32 elements of all parts in UB, twice (double buffering): 128 of 192 KB
constexpr int64_t kOrderedSumMaxTile = 4096;

}  // namespace megatron_ext
