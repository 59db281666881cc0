// Threads kept between launches.
#pragma once
#include <functional>

namespace ascendc_host {

// Calls work(0) on this thread and work(1) ... work(threads - 1) on others; returns when all have returned. Launches queue up.
void run_on_workers(int threads, const std::function<void(int)>& work);

}  // namespace ascendc_host
