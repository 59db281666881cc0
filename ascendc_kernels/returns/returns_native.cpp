// Native twins of the kernels of this folder (reference/returns.py). Scans: sequences over threads, lanes of vectors are sequences.
#include <cmath>
#include <limits>

#include "native_call.h"
#include "parallel.h"
#include "returns_tiling.h"
#include "row_sums.h"

namespace megatron_ext {
namespace {

constexpr double kWorkOfStep = 8, kWorkOfTerm = 2;  // as much as so many multiply-adds of a contraction

void gae(const KernelCall& call, const ScanTiling& t) {
    const float *rewards = static_cast<const float*>(call.operands[0]), *values = static_cast<const float*>(call.operands[1]);
    const float *mask = static_cast<const float*>(call.operands[2]), *bootstrap = static_cast<const float*>(call.operands[3]);
    float *advantages = static_cast<float*>(call.operands[4]), *returns = static_cast<float*>(call.operands[5]);
    parallel_ranges(t.sequences, call.threads, kWorkOfStep * t.sequences * t.steps, [=](Index first, Index last) {
        std::vector<float> next_values(bootstrap + first, bootstrap + last), running(last - first);
        float *next_value = next_values.data() - first, *advantage = running.data() - first;
        for (Index step = t.steps - 1; step >= 0; --step) {
            const Index at = step * t.sequences;
#pragma GCC ivdep
            for (Index n = first; n < last; ++n) {
                const bool kept = mask[at + n] != 0.0f;
                const float value = values[at + n];
                const float found = ((rewards[at + n] + t.gamma * next_value[n]) - value) + t.decay * advantage[n];
                advantage[n] = kept ? found : advantage[n];
                next_value[n] = kept ? value : next_value[n];
                advantages[at + n] = kept ? found : 0.0f;
                returns[at + n] = kept ? found + value : 0.0f;
            }
        }
    });
}

void discounted_returns(const KernelCall& call, const ScanTiling& t) {
    const float *rewards = static_cast<const float*>(call.operands[0]), *mask = static_cast<const float*>(call.operands[1]);
    const float* bootstrap = static_cast<const float*>(call.operands[2]);
    float* returns = static_cast<float*>(call.operands[3]);
    parallel_ranges(t.sequences, call.threads, kWorkOfStep * t.sequences * t.steps, [=](Index first, Index last) {
        std::vector<float> state(bootstrap + first, bootstrap + last);
        float* running = state.data() - first;
        for (Index step = t.steps - 1; step >= 0; --step) {
            const Index at = step * t.sequences;
#pragma GCC ivdep
            for (Index n = first; n < last; ++n) {
                const bool kept = mask[at + n] != 0.0f;
                const float found = rewards[at + n] + t.gamma * running[n];
                running[n] = kept ? found : running[n];
                returns[at + n] = kept ? found : 0.0f;
            }
        }
    });
}

// row_sum of n terms; term(x, kept) on vectors.
template <typename Term>
inline float masked_row_sum(const float* x, const float* mask, Index n, Term term) {
    const Index whole = n / kRowSumBlock * kRowSumBlock;
    const auto masked = [=](const float* from, const float* kept) { return Lanes(IntLanes(term(load(from))) & (load(kept) != 0.0f)); };
    const float total = sum_of_blocks(whole, [=](Index i, Lanes* v) {
        for (Index j = 0; j < kTogether; ++j) v[j] = masked(x + i + j * kLanes, mask + i + j * kLanes);
    });
    if (whole == n) return total;
    float tail[kRowSumBlock] = {}, tail_mask[kRowSumBlock] = {};
    std::copy_n(x + whole, n - whole, tail);
    std::copy_n(mask + whole, n - whole, tail_mask);
    for (Index i = 0; i < kRowSumBlock; i += kLanes) store(tail + i, masked(tail + i, tail_mask + i));
    return total + block_sum(tail);
}

void masked_sum(const KernelCall& call, const MaskedSumTiling& t) {
    const float *x = static_cast<const float*>(call.operands[0]), *mask = static_cast<const float*>(call.operands[1]);
    const float centre = t.squared ? *static_cast<const float*>(call.operands[2]) : 0.0f;
    float* sums = static_cast<float*>(call.operands[3]);
    parallel_ranges(t.sequences, call.threads, kWorkOfTerm * t.sequences * t.tokens, [=](Index first, Index last) {
        for (Index n = first; n < last; ++n) {
            const float *row = x + n * t.tokens, *kept = mask + n * t.tokens;
            sums[n] = t.squared ? masked_row_sum(row, kept, t.tokens, [=](Lanes v) { return (v - centre) * (v - centre); })
                                : masked_row_sum(row, kept, t.tokens, [](Lanes v) { return v; });
        }
    });
}

void total(const KernelCall& call, const TotalTiling& t) {
    const float* x = static_cast<const float*>(call.operands[0]);
    float sum = 0.0f;
    for (Index i = 0; i < t.count; ++i) sum = sum + x[i];
    *static_cast<float*>(call.operands[1]) = sum;
}

void whiten(const KernelCall& call, const WhitenTiling& t) {
    const float *x = static_cast<const float*>(call.operands[0]), *mask = static_cast<const float*>(call.operands[1]);
    const float mean = *static_cast<const float*>(call.operands[2]), deviation = std::sqrt(*static_cast<const float*>(call.operands[3]) + t.eps);
    float* y = static_cast<float*>(call.operands[4]);
    parallel_ranges(t.size, call.threads, kWorkOfStep * t.size, [=](Index first, Index last) {
#pragma GCC ivdep
        for (Index i = first; i < last; ++i) y[i] = mask[i] != 0.0f ? (x[i] - mean) / deviation : 0.0f;
    });
}

}  // namespace
}  // namespace megatron_ext

MEGATRON_EXT_NATIVE(gae_f32, megatron_ext::ScanTiling, megatron_ext::gae)
MEGATRON_EXT_NATIVE(discounted_returns_f32, megatron_ext::ScanTiling, megatron_ext::discounted_returns)
MEGATRON_EXT_NATIVE(masked_sum_f32, megatron_ext::MaskedSumTiling, megatron_ext::masked_sum)
MEGATRON_EXT_NATIVE(total_f32, megatron_ext::TotalTiling, megatron_ext::total)
MEGATRON_EXT_NATIVE(whiten_f32, megatron_ext::WhitenTiling, megatron_ext::whiten)
