// The arithmetic behind deviation.h: Mmad element by element, sums and results of vector instructions, with the deviation that is on.
#pragma once
#include "core.h"
#include "deviation.h"
#include "sums.h"

namespace ascendc_host {

// The order in which row `row` and column `column` of an Mmad of m rows adds.
inline megatron_ext::MmadOrder deviating_order(megatron_ext::MmadOrder order, uint32_t m, uint32_t row, uint32_t column) {
    constexpr uint32_t kFew = 16;
    const bool other = (deviates(Deviation::mmad_rows_differ) && row >= kFew) || (deviates(Deviation::mmad_columns_differ) && column >= kFew) ||
                       (deviates(Deviation::mmad_few_rows_differ) && m <= kFew) || (deviates(Deviation::mmad_by_core) && core().block % 2 == 1);
    if (!other) return order;
    return order == megatron_ext::kGroups16 ? megatron_ext::kSequential : megatron_ext::kGroups16;
}

// c and `length` terms: a row of A, a column of a panel of B.
inline float deviating_element(float c, const float* a, const float* panel, uint32_t length, megatron_ext::MmadOrder order) {
    const bool flush = deviates(Deviation::mmad_flushes), restart = deviates(Deviation::mmad_restarts);
    const auto round = [flush](float x) { return flush ? flushed(x) : x; };
    const auto term = [&](uint32_t i) {
        const uint32_t k = deviates(Deviation::mmad_descending) ? length - 1 - i : i;
        return round(round(a[k]) * round(panel[k * megatron_ext::kPanel]));
    };
    const uint32_t group = order == megatron_ext::kGroups16 ? uint32_t(megatron_ext::kFractal) : 1;
    float sum = restart ? 0.0f : c;
    for (uint32_t first = 0; first < length; first += group) {
        float terms[megatron_ext::kFractal] = {};
        for (uint32_t i = 0; i < group && first + i < length; ++i) terms[i] = term(first + i);
        sum = round(sum + megatron_ext::pair_tree(terms, group));
    }
    return restart ? c + sum : sum;
}

// Rows m of one panel of 16 columns, the first of which is `column`.
inline void deviating_tiles(megatron_ext::MmadOrder order, const float* a, uint32_t a_stride, uint32_t m, const float* panel, uint32_t column,
                            uint32_t length, float* c) {
    for (uint32_t row = 0; row < m; ++row)
        for (uint32_t n = 0; n < uint32_t(megatron_ext::kPanel); ++n) {
            float& element = c[row * megatron_ext::kPanel + n];
            element = deviating_element(element, a + uint64_t(row) * a_stride, panel + n, length, deviating_order(order, m, row, column + n));
        }
}

// What a device might make of the results of a vector instruction.
inline void deviate_results(const char* name, float* results, uint32_t count) {
    constexpr uint32_t kBlock = 8;
    const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
    const bool function = is("Exp") || is("Ln") || is("Sqrt") || is("Div");
    for (uint32_t i = 0; i < count; ++i) {
        float& x = results[i];
        const bool off = deviates(Deviation::exp_other_bits) || (deviates(Deviation::exp_by_lane) && i % kBlock == kBlock - 1) ||
                         (deviates(Deviation::exp_by_core) && core().block % 2 == 1);
        if (function && off) x = last_bit_off(x);
        if (deviates(Deviation::vector_flushes)) x = flushed(x);
        if (deviates(Deviation::adds_loses_the_sign) && is("Adds") && x == 0.0f) x = 0.0f;
        if (deviates(Deviation::max_prefers_positive_zero) && is("Max") && x == 0.0f) x = 0.0f;
        if (deviates(Deviation::max_drops_nan) && is("Max") && std::isnan(x)) x = 0.0f;
    }
}

// Sum of a repeat of 64 lanes.
inline float deviating_repeat(const float* lanes) {
    constexpr int kLanesOfARepeat = 64;
    float terms[kLanesOfARepeat], total = lanes[0];
    std::memcpy(terms, lanes, sizeof(terms));
    if (!deviates(Deviation::sum_ascending)) return megatron_ext::pair_tree(terms, kLanesOfARepeat);
    for (int i = 1; i < kLanesOfARepeat; ++i) total = total + lanes[i];
    return total;
}

// ReduceSum by count, of whole repeats.
inline float deviating_sum(const float* src, int32_t count) {
    constexpr int kLanesOfARepeat = 64;
    float total = deviates(Deviation::sum_starts_with_a_repeat) ? -0.0f : 0.0f;
    for (int32_t first = 0; first < count; first += kLanesOfARepeat)
        total = total + deviating_repeat(src + (deviates(Deviation::sum_repeats_descending) ? count - kLanesOfARepeat - first : first));
    return deviates(Deviation::vector_flushes) ? flushed(total) : total;
}

}  // namespace ascendc_host
