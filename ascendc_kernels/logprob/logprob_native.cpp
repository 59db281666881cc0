// Native twins of the kernels of this folder (reference/logprob.py). Rows over threads; where there are fewer rows than threads, the segments of
// a row: each sum is its own result. Legend: t temperature.
#include "logprob_tiling.h"
#include "native_call.h"
#include "parallel.h"
#include "softmax.h"

namespace megatron_ext {
namespace {

constexpr double kWorkOfExponent = 16, kWorkOfCopy = 4;  // an element costs about as much as so many multiply-adds of a contraction
constexpr double kWorkInsideRow = 4;  // inside a row threads are woken for each step, so less is won by them
constexpr Index kStep = kTogether * kLanes;

// A row of logits and what divides it.
template <bool kScaled>
struct Row {
    const float* x;
    float temperature;

    Row(const KernelCall& call, const LogprobTiling& tiling, Index row)
        : x(static_cast<const float*>(call.operands[0]) + row * tiling.row_stride),
          temperature(kScaled ? static_cast<const float*>(call.operands[1])[row * tiling.temperature_stride] : 1.0f) {}

    float at(Index i) const { return kScaled ? x[i] / temperature : x[i]; }
    Lanes lanes(Index i) const { return kScaled ? load(x + i) / temperature : load(x + i); }
};

// body(row, threads for this row) over all rows.
template <typename Body>
inline void over_rows(const KernelCall& call, const LogprobTiling& tiling, double work_of_element, Body body) {
    if (tiling.rows < call.threads.count) {
        for (Index row = 0; row < tiling.rows; ++row) body(row, call.threads);
        return;
    }
    parallel_ranges(tiling.rows, call.threads, work_of_element * tiling.rows * tiling.columns, [&](Index first, Index last) {
        for (Index row = first; row < last; ++row) body(row, kOneThread);
    });
}

// The maximum of the quotients is the quotient of the maximum: rounding keeps an order, and t > 0.
template <bool kScaled>
float row_maximum(const Row<kScaled>& row, Index valid) {
    const float largest = maximum(row.x, valid);
    return (kScaled ? largest / row.temperature : largest) + 0.0f;
}

template <bool kScaled>
float segment_sum(const Row<kScaled>& row, float row_max, Index first, Index count) {
    const Lanes maxima = splat(row_max);
    const Index whole = count / kRowSumBlock * kRowSumBlock;
    const float total = sum_of_blocks(whole, [&](Index i, Lanes* v) {
        for (Index j = 0; j < kTogether; ++j) v[j] = row.lanes(first + i + j * kLanes) - maxima;
        exp_lanes(v);
    });
    if (whole == count) return total;
    float tail[kRowSumBlock] = {};
    for (Index i = whole; i < count; ++i) tail[i - whole] = exp_f32(row.at(first + i) - row_max);
    return total + pair_tree(tail, kRowSumBlock);
}

template <bool kScaled>
float row_exp_sum(const Row<kScaled>& row, float row_max, const LogprobTiling& tiling, const Threads& threads) {
    float sums[kLogprobMaxSegments];
    parallel_ranges(tiling.segments, threads, kWorkInsideRow * tiling.columns, [&](Index from, Index to) {
        for (Index s = from; s < to; ++s) {
            const Index first = s * tiling.segment, end = std::min(first + tiling.segment, tiling.valid);
            sums[s] = first < end ? segment_sum(row, row_max, first, end - first) : 0.0f;
        }
    });
    return pair_tree(sums, tiling.segments);
}

template <bool kScaled>
void vocab_max(const KernelCall& call, const LogprobTiling& tiling) {
    float* row_max = static_cast<float*>(call.operands[2]);
    parallel_ranges(tiling.rows, call.threads, kWorkOfCopy * tiling.rows * tiling.columns, [&](Index first, Index last) {
        for (Index row = first; row < last; ++row) row_max[row] = row_maximum(Row<kScaled>(call, tiling, row), tiling.valid);
    });
}

template <bool kScaled>
void vocab_exp_sum(const KernelCall& call, const LogprobTiling& tiling) {
    const float* row_max = static_cast<const float*>(call.operands[2]);
    float* exp_sum = static_cast<float*>(call.operands[3]);
    over_rows(call, tiling, kWorkOfExponent, [&](Index row, const Threads& threads) {
        exp_sum[row] = row_exp_sum(Row<kScaled>(call, tiling, row), row_max[row], tiling, threads);
    });
}

template <bool kScaled>
void token_logprob(const KernelCall& call, const LogprobTiling& tiling) {
    const int64_t* ids = static_cast<const int64_t*>(call.operands[2]);
    float *logprob = static_cast<float*>(call.operands[3]), *row_max = static_cast<float*>(call.operands[4]);
    float* exp_sum = static_cast<float*>(call.operands[5]);
    over_rows(call, tiling, kWorkOfExponent, [&](Index row, const Threads& threads) {
        const Row<kScaled> logits(call, tiling, row);
        row_max[row] = row_maximum(logits, tiling.valid);
        exp_sum[row] = row_exp_sum(logits, row_max[row], tiling, threads);
        const bool known = ids[row] >= 0 && ids[row] < tiling.valid;
        const float target = known ? logits.at(ids[row]) : std::numeric_limits<float>::quiet_NaN();
        logprob[row] = (target - row_max[row]) - log_f32(exp_sum[row]);
    });
}

template <bool kScaled>
void log_softmax(const KernelCall& call, const LogprobTiling& tiling) {
    float* logprobs = static_cast<float*>(call.operands[2]);
    over_rows(call, tiling, kWorkOfExponent, [&](Index row, const Threads& threads) {
        const Row<kScaled> logits(call, tiling, row);
        const float row_max = row_maximum(logits, tiling.valid), log_sum = log_f32(row_exp_sum(logits, row_max, tiling, threads));
        float* out = logprobs + row * tiling.columns;
        parallel_ranges(tiling.columns, threads, kWorkInsideRow * tiling.columns, [&](Index first, Index last) {
            for (Index i = first; i < last; ++i) out[i] = (logits.at(i) - row_max) - log_sum;
        });
    });
}

void logprob_from_parts(const KernelCall& call, const LogprobTiling& tiling) {
    const float *target = static_cast<const float*>(call.operands[0]), *row_max = static_cast<const float*>(call.operands[1]);
    const float* exp_sum = static_cast<const float*>(call.operands[2]);
    float* logprob = static_cast<float*>(call.operands[3]);
    parallel_ranges(tiling.rows, call.threads, kWorkOfExponent * tiling.rows, [&](Index first, Index last) {
        for (Index i = first; i < last; ++i) logprob[i] = (target[i] - row_max[i]) - log_f32(exp_sum[i]);
    });
}

// Columns [first, last) of a row.
template <typename Out, bool kScaled>
void dlogits_range(const Row<kScaled>& row, float row_max, float exp_sum, float grad, Index first, Index last, Out* out) {
    const Lanes maxima = splat(row_max);
    Index i = first;
    for (; i + kStep <= last; i += kStep) {
        Lanes v[kTogether];
        for (Index j = 0; j < kTogether; ++j) v[j] = row.lanes(i + j * kLanes) - maxima;
        exp_lanes(v);
        for (Index j = 0; j < kTogether; ++j) v[j] = (0.0f - v[j] / exp_sum) * grad;
        float wide[kStep];
        for (Index j = 0; j < kTogether; ++j) store(wide + j * kLanes, v[j]);
        for (Index j = 0; j < kStep; ++j) out[i + j] = from_float<Out>(wide[j]);
    }
    for (; i < last; ++i) out[i] = from_float<Out>((0.0f - exp_f32(row.at(i) - row_max) / exp_sum) * grad);
}

template <typename Out, bool kScaled>
void vocab_dlogits(const KernelCall& call, const LogprobTiling& tiling) {
    const float *row_max = static_cast<const float*>(call.operands[2]), *exp_sum = static_cast<const float*>(call.operands[3]);
    const int64_t* targets = static_cast<const int64_t*>(call.operands[4]);
    const float* grad = static_cast<const float*>(call.operands[5]);
    Out* dlogits = static_cast<Out*>(call.operands[6]);
    over_rows(call, tiling, kWorkOfExponent, [&](Index row, const Threads& threads) {
        const Row<kScaled> logits(call, tiling, row);
        Out* out = dlogits + row * tiling.columns;
        parallel_ranges(tiling.valid, threads, kWorkInsideRow * tiling.valid, [&](Index first, Index last) {
            dlogits_range(logits, row_max[row], exp_sum[row], grad[row], first, last, out);
        });
        std::fill(out + tiling.valid, out + tiling.columns, from_float<Out>(0.0f));
        const int64_t target = targets[row];
        if (target >= 0 && target < tiling.valid)
            out[target] = from_float<Out>((1.0f - exp_f32(logits.at(target) - row_max[row]) / exp_sum[row]) * grad[row]);
    });
}

// `scaled` and `plain` are one function with and without a temperature.
template <auto scaled, auto plain>
void either(const KernelCall& call, const LogprobTiling& tiling) {
    tiling.scaled ? scaled(call, tiling) : plain(call, tiling);
}

}  // namespace
}  // namespace megatron_ext

#define LOGPROB_NATIVE(name)                                                         \
    MEGATRON_EXT_NATIVE(name##_f32, megatron_ext::LogprobTiling,                     \
                        megatron_ext::either<megatron_ext::name<true>, megatron_ext::name<false>>)
LOGPROB_NATIVE(vocab_max)
LOGPROB_NATIVE(vocab_exp_sum)
LOGPROB_NATIVE(token_logprob)
LOGPROB_NATIVE(log_softmax)
#define DLOGITS_NATIVE(suffix, Out)                                                  \
    MEGATRON_EXT_NATIVE(vocab_dlogits_##suffix, megatron_ext::LogprobTiling,         \
                        megatron_ext::either<megatron_ext::vocab_dlogits<Out, true>, megatron_ext::vocab_dlogits<Out, false>>)
DLOGITS_NATIVE(f32, float)
DLOGITS_NATIVE(bf16, megatron_ext::BFloat16)
DLOGITS_NATIVE(f16, megatron_ext::Float16)
MEGATRON_EXT_NATIVE(logprob_from_parts_f32, megatron_ext::LogprobTiling, megatron_ext::logprob_from_parts)
