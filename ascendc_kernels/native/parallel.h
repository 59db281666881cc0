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

}  // namespace megatron_ext
