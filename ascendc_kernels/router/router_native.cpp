// Native twins of route and route_backward (reference/router.py). Legend: E experts, k slots.
#include "native_call.h"
#include "parallel.h"
#include "router_tiling.h"

namespace megatron_ext {
namespace {

constexpr double kWorkOfExpert = 24;  // an expert of a token costs about as much as so many multiply-adds of a contraction
constexpr float kInfinity = std::numeric_limits<float>::infinity(), kLowest = std::numeric_limits<float>::lowest();

inline float largest(const float* x, Index count) {
    float found = -kInfinity;
    for (Index i = 0; i < count; ++i) found = x[i] > found || x[i] != x[i] ? x[i] : found;
    return found;
}

inline void scores(const RouterTiling& t, const float* x, float* s) {
    const Index experts = t.experts;
    if (t.sigmoid) {
#pragma GCC ivdep
        for (Index e = 0; e < experts; ++e) s[e] = 1.0f / (exp_f32(-x[e]) + 1.0f);
        return;
    }
    const float max = largest(x, experts);
#pragma GCC ivdep
    for (Index e = 0; e < experts; ++e) s[e] = exp_f32(x[e] - max);
    const float sum = row_sum(experts, [=](Index e) { return s[e]; });
#pragma GCC ivdep
    for (Index e = 0; e < experts; ++e) s[e] = s[e] / sum;
}

// The `k` largest of values, the largest first, ties by lower index.
inline void choose(const float* values, Index count, Index k, Index* chosen) {
    float best[kRouterMaxSlots];
    Index found = 0;
    for (Index i = 0; i < count; ++i) {
        if (found == k && !(values[i] > best[k - 1])) continue;
        Index at = found < k ? found++ : k - 1;
        for (; at > 0 && values[i] > best[at - 1]; --at) {
            best[at] = best[at - 1];
            chosen[at] = chosen[at - 1];
        }
        best[at] = values[i];
        chosen[at] = i;
    }
}

inline float slot_sum(const float* x, Index slots) {
    float total = 0.0f;
    for (Index i = 0; i < slots; ++i) total = total + x[i];
    return total;
}

// The lowest number outside the groups with the largest sums of their best values.
inline void keep_groups(const RouterTiling& t, float* choice) {
    const Index size = t.experts / t.groups;
    Index best[kRouterMaxSlots], kept[kRouterMaxSlots];
    float group[kRouterMaxSlots];
    for (Index g = 0; g < t.groups; ++g) {
        const float* own = choice + g * size;
        choose(own, size, t.best_of_group, best);
        group[g] = 0.0f;
        for (Index i = 0; i < t.best_of_group; ++i) group[g] = group[g] + own[best[i]];
        group[g] = std::max(group[g], kLowest);
    }
    choose(group, t.groups, t.kept_groups, kept);
    for (Index g = 0; g < t.groups; ++g)
        if (std::find(kept, kept + t.kept_groups, g) == kept + t.kept_groups) std::fill_n(choice + g * size, size, kLowest);
}

// What experts are chosen by. NaN counts as +inf, -inf as the lowest number, as in the kernel.
inline void choice_of(const RouterTiling& t, const float* s, const float* bias, float* choice) {
#pragma GCC ivdep
    for (Index e = 0; e < t.experts; ++e) {
        const float value = t.biased ? s[e] + bias[e] : s[e];
        choice[e] = value != value ? kInfinity : value > kLowest ? value : kLowest;
    }
    if (t.groups > 0) keep_groups(t, choice);
}

void route(const KernelCall& call, const RouterTiling& t) {
    const float *logits = static_cast<const float*>(call.operands[0]), *bias = static_cast<const float*>(call.operands[1]);
    float* all_weights = static_cast<float*>(call.operands[2]);
    int64_t* all_ids = static_cast<int64_t*>(call.operands[3]);
    parallel_ranges(t.tokens, call.threads, kWorkOfExpert * t.tokens * t.experts, [=](Index first, Index last) {
        std::vector<float> room(2 * t.experts);
        float *s = room.data(), *choice = s + t.experts;
        for (Index token = first; token < last; ++token) {
            float* weights = all_weights + token * t.top_k;
            int64_t* ids = all_ids + token * t.top_k;
            scores(t, logits + token * t.experts, s);
            choice_of(t, s, bias, choice);
            choose(choice, t.experts, t.top_k, ids);
            for (Index i = 0; i < t.top_k; ++i) weights[i] = s[ids[i]];
            const float total = slot_sum(weights, t.top_k);
            for (Index i = 0; i < t.top_k; ++i) weights[i] = (t.renormalize ? weights[i] / total : weights[i]) * t.scale;
        }
    });
}

// d = dweights * scale through the renormalisation
inline void gradient_of_chosen(const RouterTiling& t, const float* dweights, const float* s, const int64_t* ids, float* d) {
    float chosen[kRouterMaxSlots], terms[kRouterMaxSlots];
    for (Index i = 0; i < t.top_k; ++i) d[i] = dweights[i] * t.scale;
    if (!t.renormalize) return;
    for (Index i = 0; i < t.top_k; ++i) chosen[i] = s[ids[i]];
    const float total = slot_sum(chosen, t.top_k);
    for (Index i = 0; i < t.top_k; ++i) terms[i] = d[i] * (chosen[i] / total);
    const float dot = slot_sum(terms, t.top_k);
    for (Index i = 0; i < t.top_k; ++i) d[i] = (d[i] - dot) / total;
}

void route_backward(const KernelCall& call, const RouterTiling& t) {
    const float *all_dweights = static_cast<const float*>(call.operands[0]), *logits = static_cast<const float*>(call.operands[1]);
    const int64_t* all_ids = static_cast<const int64_t*>(call.operands[2]);
    float* all_dlogits = static_cast<float*>(call.operands[3]);
    parallel_ranges(t.tokens, call.threads, kWorkOfExpert * t.tokens * t.experts, [=](Index first, Index last) {
        std::vector<float> room(2 * t.experts);
        float *s = room.data(), *ds = s + t.experts, d[kRouterMaxSlots];
        for (Index token = first; token < last; ++token) {
            const int64_t* ids = all_ids + token * t.top_k;
            float* dlogits = all_dlogits + token * t.experts;
            scores(t, logits + token * t.experts, s);
            gradient_of_chosen(t, all_dweights + token * t.top_k, s, ids, d);
            std::fill_n(ds, t.experts, 0.0f);
            for (Index i = 0; i < t.top_k; ++i) ds[ids[i]] = d[i];
            const float dot = t.sigmoid ? 0.0f : row_sum(t.experts, [=](Index e) { return ds[e] * s[e]; });
#pragma GCC ivdep
            for (Index e = 0; e < t.experts; ++e) dlogits[e] = t.sigmoid ? ds[e] * (s[e] * (1.0f - s[e])) : s[e] * (ds[e] - dot);
        }
    });
}

}  // namespace
}  // namespace megatron_ext

MEGATRON_EXT_NATIVE(route_f32, megatron_ext::RouterTiling, megatron_ext::route)
MEGATRON_EXT_NATIVE(route_backward_f32, megatron_ext::RouterTiling, megatron_ext::route_backward)
