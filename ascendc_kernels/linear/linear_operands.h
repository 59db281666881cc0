// What the bindings of contractions share, here and in ../grouped_linear: rows in place, the pieces of the segment tree, tiles.
#pragma once
#include <ATen/ops/arange.h>

#include "binding.h"
#include "linear_tiling.h"

namespace megatron_ext {

constexpr int64_t kFractal = MEGATRON_EXT_FRACTAL;

inline int64_t cuts(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }
inline int64_t tile_of(int64_t size) { return std::min(kLinearTile, cuts(size, kFractal) * kFractal); }

// x [..., K] as [M, K] with dense rows, in place unless the leading dimensions do not collapse into one.
inline at::Tensor rows(const at::Tensor& x) {
    const int64_t last = x.dim() - 1;
    bool regular = x.numel() > 0 && last >= 1 && x.stride(last) == 1 && x.stride(last - 1) >= x.size(last);
    for (int64_t d = 0; d + 1 < last; ++d) regular = regular && x.stride(d) == x.stride(d + 1) * x.size(d + 1);
    const at::Tensor readable = regular ? x : x.contiguous();
    return readable.view({-1, x.size(last)});
}

inline int64_t row_stride(const at::Tensor& matrix) { return matrix.size(0) > 1 ? matrix.stride(0) : matrix.size(1); }

inline void check_segments(const char* op, int64_t segments) {
    TORCH_CHECK_VALUE(segments >= 1 && (segments & (segments - 1)) == 0 && segments <= kLinearMaxPieces, op,
                      ": segments must be a power of two up to ", kLinearMaxPieces, ", found ", segments);
}

inline void check_pieces_of_k(const char* op, int64_t k, int64_t segments) {
    check_segments(op, segments);
    TORCH_CHECK_VALUE(k > 0 && k % (kFractal * segments) == 0, op, ": K must be a positive multiple of ", kFractal, " x segments = ", kFractal * segments,
                      ", found ", k);
}

inline void check_pieces_of_n(const char* op, int64_t n, int64_t segments, bool gated) {
    check_segments(op, segments);
    const int64_t quantum = segments * (gated ? 2 : 1);
    TORCH_CHECK_VALUE(n > 0 && n % quantum == 0, op, ": N must be a positive multiple of ", gated ? "2 x segments" : "segments", " = ", quantum, ", found ",
                      n);
}

// x [m][k] x weight [n][k]: the contraction is over k. Rows, strides and tiles are left to the caller.
inline LinearTiling tiling_of_linear(int64_t n, int64_t k, int64_t segments) {
    LinearTiling tiling{};
    tiling.n = n;
    tiling.k = k;
    tiling.pieces = segments;
    tiling.runs = 1;
    tiling.run = k / segments;
    tiling.b_rows_of_n = 1;
    return tiling;
}

// dy [m][n] x weight [n][k]: the contraction is over n. gated: piece s of [gate | up] is gate piece s, then up piece s.
inline LinearTiling tiling_of_dgrad(int64_t n, int64_t k, int64_t segments, bool gated) {
    LinearTiling tiling{};
    tiling.n = k;
    tiling.k = n;
    tiling.pieces = segments;
    tiling.runs = gated ? 2 : 1;
    tiling.run = n / (segments * tiling.runs);
    tiling.apart = n / 2;
    return tiling;
}

// Where a group of 16 would begin in the gate and end in the up half, the pieces have to lie side by side: the order of their elements along the
// contraction, which `tiling` then takes for granted. Undefined where they can be read in place.
inline at::Tensor order_of_ragged_pieces(LinearTiling& tiling, const at::Device& device) {
    if (tiling.runs == 1 || tiling.run % kFractal == 0) return {};
    const at::Tensor order = at::arange(tiling.k, at::TensorOptions(device).dtype(at::kLong)).view({2, tiling.pieces, tiling.run});
    tiling.runs = 1;
    tiling.run *= 2;
    return order.transpose(0, 1).reshape(-1);
}

// The result of x [..., K] with another last dimension.
inline at::Tensor result_like(const at::Tensor& x, const c10::SymInt& last, at::ScalarType dtype) {
    c10::SymDimVector sizes(x.sym_sizes());
    sizes.back() = last;
    return at::empty_symint(sizes, x.options().dtype(dtype));
}

}  // namespace megatron_ext
