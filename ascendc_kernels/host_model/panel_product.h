// c[rows][16] += a[rows][k] x panel[k][16] in fp32, with the orders and bits of megatron_ext::contract_rows (../../megatron_ext/ops/native/sums.h).
//
// Where every product is exact, a fused multiply-add rounds as a multiplication and an addition do, at twice the speed; the caller says so.
#pragma once
#include "sums.h"

namespace ascendc_host {

typedef float Lanes __attribute__((vector_size(32), aligned(4), may_alias));
constexpr int kLanes = 8;
constexpr int kPanelWidth = 16;

struct PanelProduct {
    const float* a;
    int64_t a_stride;
    const float* panel;
    int64_t length;  // groups16: a multiple of 16
    float* c;        // rows of 16
};

inline Lanes load_lanes(const float* from) { return *reinterpret_cast<const Lanes*>(from); }
inline void store_lanes(float* to, Lanes value) { *reinterpret_cast<Lanes*>(to) = value; }
inline Lanes all_lanes(float value) { return Lanes{value, value, value, value, value, value, value, value}; }

struct Unfused {
    static inline Lanes add_product(Lanes sum, Lanes a, Lanes b) { return sum + a * b; }
};

// ---- one after another along k

template <int rows, typename Arithmetic>
inline __attribute__((always_inline)) void add_sequential(const PanelProduct& p, int64_t first_row) {
    Lanes left[rows], right[rows];
    float* c = p.c + first_row * kPanelWidth;
    const float* a = p.a + first_row * p.a_stride;
    for (int r = 0; r < rows; ++r) {
        left[r] = load_lanes(c + r * kPanelWidth);
        right[r] = load_lanes(c + r * kPanelWidth + kLanes);
    }
    for (int64_t k = 0; k < p.length; ++k) {
        const Lanes b_left = load_lanes(p.panel + k * kPanelWidth), b_right = load_lanes(p.panel + k * kPanelWidth + kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            const Lanes x = all_lanes(a[r * p.a_stride + k]);
            left[r] = Arithmetic::add_product(left[r], x, b_left);
            right[r] = Arithmetic::add_product(right[r], x, b_right);
        }
    }
    for (int r = 0; r < rows; ++r) {
        store_lanes(c + r * kPanelWidth, left[r]);
        store_lanes(c + r * kPanelWidth + kLanes, right[r]);
    }
}

// ---- groups of 16: a tree of adjacent pairs, then one addition to the accumulator

template <int count, typename Arithmetic>
inline __attribute__((always_inline)) Lanes product_tree(const float* a, const float* b) {
    if constexpr (count == 2) {
        const Lanes second = all_lanes(a[1]) * load_lanes(b + kPanelWidth);
        return Arithmetic::add_product(second, all_lanes(a[0]), load_lanes(b));
    } else {
        const Lanes low = product_tree<count / 2, Arithmetic>(a, b);
        return low + product_tree<count / 2, Arithmetic>(a + count / 2, b + count / 2 * kPanelWidth);
    }
}

template <typename Arithmetic>
inline __attribute__((always_inline)) void add_groups(const PanelProduct& p, int64_t row) {
    float* c = p.c + row * kPanelWidth;
    const float* a = p.a + row * p.a_stride;
    Lanes left = load_lanes(c), right = load_lanes(c + kLanes);
    for (int64_t k = 0; k < p.length; k += 16) {
        left = left + product_tree<16, Arithmetic>(a + k, p.panel + k * kPanelWidth);
        right = right + product_tree<16, Arithmetic>(a + k, p.panel + k * kPanelWidth + kLanes);
    }
    store_lanes(c, left);
    store_lanes(c + kLanes, right);
}

constexpr int kRowsTogether = 6;  // twelve accumulators, two panel vectors and a broadcast fill the sixteen registers

template <typename Arithmetic>
inline __attribute__((always_inline)) void add_panel_product(megatron_ext::MmadOrder order, const PanelProduct& p, int64_t rows) {
    int64_t row = 0;
    if (order == megatron_ext::kGroups16) {
        for (; row < rows; ++row) add_groups<Arithmetic>(p, row);
        return;
    }
    for (; row + kRowsTogether <= rows; row += kRowsTogether) add_sequential<kRowsTogether, Arithmetic>(p, row);
    for (; row + 2 <= rows; row += 2) add_sequential<2, Arithmetic>(p, row);
    for (; row < rows; ++row) add_sequential<1, Arithmetic>(p, row);
}

#if defined(__FMA__)
struct Fused {
    static inline Lanes add_product(Lanes sum, Lanes a, Lanes b) { return __builtin_ia32_vfmaddps256(a, b, sum); }
};
#else
using Fused = Unfused;
#endif

inline void add_panel_product(bool exact, megatron_ext::MmadOrder order, const PanelProduct& p, int64_t rows) {
    if (exact)
        add_panel_product<Fused>(order, p, rows);
    else
        add_panel_product<Unfused>(order, p, rows);
}

}  // namespace ascendc_host
