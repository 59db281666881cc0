// Ranges of independent work over torch's threads: after a torch operator they are awake, and threads of our own would have to share
// the cores with them.
#pragma once
#include <algorithm>
#include <vector>

#include "kernel_call.h"
#include "sums.h"

namespace megatron_ext {

constexpr double kWorkPerThread = 1 << 18;  // multiply-adds below which a thread costs more than it saves
constexpr Threads kOneThread = {1, nullptr};

// body(first, last) over [0, count), cut into nearly equal ranges. work: multiply-adds of the whole.
template <typename Body>
inline void parallel_ranges(Index count, const Threads& threads, double work, Body body) {
    const Index useful = std::max<Index>(1, std::min<Index>({threads.count, count, Index(work / kWorkPerThread)}));
    if (useful == 1) return body(0, count);
    const auto range = [&](int64_t i) { body(count * i / useful, count * (i + 1) / useful); };
    threads.run(useful, [](void* context, int64_t i) { (*static_cast<decltype(range)*>(context))(i); }, const_cast<void*>(static_cast<const void*>(&range)));
}

// body(group, first, last) over units [0, units) of every group, cut into ranges of nearly equal cost, some of which hold several groups. cost(group):
// multiply-adds of a unit; 0 leaves the group out.
template <typename Cost, typename Body>
inline void parallel_groups(Index groups, Index units, const Threads& threads, Cost cost, Body body) {
    double total = 0;
    for (Index g = 0; g < groups; ++g) total += cost(g) * units;
    const Index ranges = std::max<Index>(1, std::min<Index>(threads.count, Index(total / kWorkPerThread)));
    parallel_ranges(ranges, threads, total, [&](Index first_range, Index last_range) {
        double before = 0;  // cost of the groups before
        const auto unit_at = [&](Index range, double each) {
            return range == ranges ? units : std::clamp<Index>(Index(std::ceil((total * range / ranges - before) / each)), 0, units);
        };
        for (Index g = 0; g < groups; ++g) {
            const double each = cost(g);
            if (each == 0) continue;
            const Index first = unit_at(first_range, each), last = unit_at(last_range, each);
            if (first < last) body(g, first, last);
            before += each * units;
        }
    });
}

}  // namespace megatron_ext
