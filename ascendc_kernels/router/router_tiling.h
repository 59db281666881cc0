// Shapes of one call, shared by the binding, the kernels and their native twins. Legend: T tokens, E experts, k slots.
#pragma once
#include <cstdint>

namespace megatron_ext {

struct RouterTiling {
    int64_t tokens, experts, top_k;
    int64_t groups, kept_groups;  // 0 groups: no limit
    int64_t best_of_group;        // how many of a group's values its score is the sum of
    float scale;
    bool sigmoid, biased, renormalize;
};

constexpr int64_t kRouterMaxExperts = 2048;  // the kernel holds 40 bytes of each in UB: 80 of 192 KB
constexpr int64_t kRouterMaxSlots = 128;

}  // namespace megatron_ext
