// Contractions in segments: forward, input gradient and weight gradient of a linear layer (reference/linear.py).
#include "sums.h"
#include "dispatch.h"

namespace megatron_ext {
namespace {

// out[M][N] = tree over segments of a[M][K] x b(k, n). b is addressed through strides and an optional row permutation of k.
struct Matrix {
    const void* data;
    Index k_stride, n_stride;
    const Index* k_order;  // nullptr: identity
};

template <typename T>
void pack_segment(std::vector<float>& panel, const Matrix& b, Index first_k, Index length, Index n0, Index columns) {
    const T* data = static_cast<const T*>(b.data);
    pack_panels(panel, length, std::min(kPanel, columns - n0), [&](Index k, Index n) {
        const Index row = b.k_order ? b.k_order[first_k + k] : first_k + k;
        return to_float(data[row * b.k_stride + (n0 + n) * b.n_stride]);
    });
}

// a [M][K] -> [segments][M][padded length]
template <typename T>
std::vector<float> split_rows(const T* a, Index m, Index k, Index segments, const Index* k_order) {
    const Index length = k / segments, padded = round_up(length, kFractal);
    std::vector<float> out(segments * m * padded, 0.0f);
    for (Index s = 0; s < segments; ++s)
        for (Index i = 0; i < m; ++i)
            for (Index j = 0; j < length; ++j) {
                const Index column = k_order ? k_order[s * length + j] : s * length + j;
                out[(s * m + i) * padded + j] = to_float(a[i * k + column]);
            }
    return out;
}

template <typename T>
void contract_segments(MmadOrder order, const T* a_data, const Matrix& b, Index m, Index k, Index n, Index segments, float* out) {
    const Index length = k / segments, padded = round_up(length, kFractal);
    const std::vector<float> a = split_rows(a_data, m, k, segments, b.k_order);
    std::vector<float> panel, parts(segments * m * kPanel);
    for (Index n0 = 0; n0 < n; n0 += kPanel) {
        std::fill(parts.begin(), parts.end(), 0.0f);
        for (Index s = 0; s < segments; ++s) {
            pack_segment<T>(panel, b, s * length, length, n0, n);
            contract_rows(order, a.data() + s * m * padded, padded, m, panel.data(), padded, parts.data() + s * m * kPanel, kPanel);
        }
        for (Index count = segments / 2; count > 0; count /= 2)
            for (Index p = 0; p < count; ++p)
                for (Index i = 0; i < m * kPanel; ++i)
                    parts[p * m * kPanel + i] = parts[2 * p * m * kPanel + i] + parts[(2 * p + 1) * m * kPanel + i];
        const Index live = std::min(kPanel, n - n0);
        for (Index i = 0; i < m; ++i) std::copy_n(parts.data() + i * kPanel, live, out + i * n + n0);
    }
}

// grad[N][K] continues through the rows of dy[M][N] and x[M][K]; every sequence starts a new block of 16 rows.
template <typename T>
void wgrad(MmadOrder order, float* grad, const T* dy, const T* x, Index n, Index k, const int32_t* boundaries, Index sequences) {
    std::vector<float> a, panels;
    const Index padded_k = round_up(k, kPanel);
    std::vector<float> c(kRows * padded_k);
    for (Index q = 0; q < sequences; ++q) {
        const Index first = boundaries[q], rows = boundaries[q + 1] - first, padded = round_up(rows, kFractal);
        pack_panels(panels, rows, k, [&](Index r, Index j) { return to_float(x[(first + r) * k + j]); });
        a.assign(kRows * padded, 0.0f);
        for (Index n0 = 0; n0 < n; n0 += kRows) {
            const Index live = std::min(kRows, n - n0);
            for (Index i = 0; i < live; ++i) {
                for (Index r = 0; r < rows; ++r) a[i * padded + r] = to_float(dy[(first + r) * n + n0 + i]);
                std::copy_n(grad + (n0 + i) * k, k, c.data() + i * padded_k);
            }
            contract_panels(order, a.data(), padded, live, panels, rows, k, c.data(), padded_k);
            for (Index i = 0; i < live; ++i) std::copy_n(c.data() + i * padded_k, k, grad + (n0 + i) * k);
        }
    }
}

}  // namespace
}  // namespace megatron_ext

using namespace megatron_ext;

extern "C" int32_t megatron_ext_contract_segments(int32_t dtype, int32_t order, const void* a, const void* b, Index b_k_stride,
                                                  Index b_n_stride, const Index* k_order, Index m, Index k, Index n, Index segments,
                                                  float* out) {
    return dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        contract_segments(MmadOrder(order), static_cast<const T*>(a), Matrix{b, b_k_stride, b_n_stride, k_order}, m, k, n, segments, out);
    });
}

extern "C" int32_t megatron_ext_wgrad(int32_t dtype, int32_t order, float* grad, const void* dy, const void* x, Index n, Index k,
                                      const int32_t* boundaries, Index sequences) {
    return dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        wgrad(MmadOrder(order), grad, static_cast<const T*>(dy), static_cast<const T*>(x), n, k, boundaries, sequences);
    });
}
