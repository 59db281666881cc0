// Shapes of one call, shared by the bindings, the kernels and their native twins.
#pragma once
#include <cstdint>

namespace megatron_ext {

// out[m][n] = tree over pieces of a[m][k] x b(k, n). b is stored by rows of n (a weight, for the forward pass) or by rows of k (for the input
// gradient). A piece is `runs` runs of `run` neighbours along k: run r of piece s begins at s * run + r * apart.
struct LinearTiling {
    int64_t m, n, k;
    int64_t a_stride, b_stride;  // elements from row to row
    int64_t pieces;              // a power of two
    int64_t runs, run, apart;
    int64_t tile_m, tile_n;      // of the output that a block computes at a time
    int64_t b_rows_of_n;
};

// grad[n][k] += dy[m][n]^T x[m][k], rows in groups of 16 anchored at each sequence's start.
struct LinearWgradTiling {
    int64_t n, k;
    int64_t dy_stride, x_stride;
    int64_t sequences;
    int64_t tile_n, tile_k;
};

// Bytes of workspace of a block: two slots of sums in fp32 and of five pieces of two bytes, and two fractals.
constexpr int64_t linear_wgrad_workspace(int64_t tile) { return 2 * tile * (4 + 5 * 2) + 2 * 256 * 2; }

constexpr int64_t kLinearMaxPieces = 128;  // a row of every piece of a tile has to fit into UB
constexpr int64_t kLinearTile = 128;       // 64 KB of L0C, so that the next tile or piece is computed while one is copied out

}  // namespace megatron_ext
