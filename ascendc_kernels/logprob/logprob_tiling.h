// Shapes of one call, shared by the binding, the kernels and their native twins.
#pragma once
#include <cstdint>

namespace megatron_ext {

struct LogprobTiling {
    int64_t rows, columns;       // of the logits of this rank
    int64_t row_stride;          // elements between rows of logits; the columns of a row lie side by side
    int64_t valid;               // columns that are tokens; the others are padding
    int64_t segments;            // leaves of the tree, a power of two
    int64_t segment;             // columns of a segment; segments * segment may exceed columns: what is not there adds +0
    int64_t temperature_stride;  // 1: a temperature for each row; 0: one for all
    bool scaled;                 // whether there is a temperature at all
};

constexpr int64_t kLogprobMaxSegments = 64;   // the segment sums of a row are one repeat, whose sum is the tree over them
constexpr int64_t kLogprobTile = 4096;        // columns in UB at a time, a multiple of 64; the gradient has eight such buffers, 128 of 192 KB
constexpr int64_t kLogprobSumTile = 64 + kLogprobTile;  // the running sum is the first of 64 lanes before the terms of a tile

}  // namespace megatron_ext
