// Shapes of one call, shared by the binding, the kernels and their native twins. Legend: T tokens, V vocabulary, B requests, W beams.
#pragma once
#include <cstdint>

namespace megatron_ext {

struct SamplingTiling {
    int64_t rows, columns;       // T and V
    int64_t row_stride;          // elements between rows of logits; the columns of a row lie side by side
    int64_t segments;            // leaves of the tree, a power of two
    int64_t segment;             // columns of a segment; segments * segment may exceed columns: what is not there adds +0
    int64_t temperature_stride;  // 1: a temperature for each row; 0: one for all
    bool scaled;                 // whether there is a temperature at all
    bool has_top_k, has_top_p, has_min_p;
};

struct BeamTiling {
    int64_t requests, beams, columns, kept;  // B, W, V, and how many continuations of a request are kept
};

constexpr int64_t kSamplingMaxSegments = 64;         // the segment sums of a row are one repeat, whose sum is the tree over them
constexpr int64_t kSamplingTile = 4096;              // columns in UB at a time, a multiple of 64; nine such buffers, 145 of 192 KB
constexpr int64_t kSamplingMaxSegment = 64 * 4096;   // columns of a segment: the sums of its blocks fit one tile
constexpr int64_t kSamplingMaxTiles = 1024;          // of a row: the maximum of each one stays in UB
constexpr int64_t kBeamMaxKept = 64;                 // a request's continuations are kept by the scalar unit

}  // namespace megatron_ext
