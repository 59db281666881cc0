// Ranges of independent work over threads. Threads are made per call: kernels run in processes that fork.
#pragma once
#include <algorithm>
#include <thread>
#include <vector>

#include "sums.h"

namespace megatron_ext {

constexpr double kWorkPerThread = 1 << 20;  // multiply-adds below which a thread costs more than it saves

// body(first, last) over [0, count), cut into nearly equal ranges. work: multiply-adds of the whole.
template <typename Body>
inline void parallel_ranges(Index count, Index threads, double work, Body body) {
    const Index useful = std::max<Index>(1, std::min<Index>({threads, count, Index(work / kWorkPerThread)}));
    std::vector<std::thread> others;
    for (Index t = 1; t < useful; ++t) others.emplace_back([=] { body(count * t / useful, count * (t + 1) / useful); });
    body(0, count / useful);
    for (std::thread& other : others) other.join();
}

}  // namespace megatron_ext
