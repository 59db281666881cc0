// One launch: the scheduler of its blocks and cores, as cores and the functions between them see it.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "block_run.h"
#include "runtime.h"

namespace ascendc_host {

constexpr int kNoType = -1;

class Launch {
 public:
    Launch(const LaunchOptions& options, bool checked, KernelBody body, const void* arguments);

    // Returns the text of the first error, or an empty one.
    std::string run();

    // From fibers.
    void declare(KernelType type, Site site);
    void wait(const Condition& condition);
    void meet(Rendezvous& meeting, int generation, int cores, const Clock& clock);
    int cores_in_launch(bool vector, bool cube) const;
    void record_error(const std::string& error);
    [[noreturn]] void leave();

    // Cores meet in them across blocks; kernels of the types that have a cross-core scheduler only.
    struct Meetings {
        Rendezvous group_flags[2][kCrossCoreFlags], sync_all[2];  // by kind of core; by vector_only
    };
    Meetings* meetings() const { return meetings_.get(); }

    const LaunchOptions options_;
    std::atomic<int> type_{kNoType};

 private:
    const KernelBody body_;
    const void* const arguments_;
    const bool checked_;
    int64_t share_ = 0;  // suspended blocks that one thread may hold
    std::unique_ptr<Monitor> monitor_;
    std::unique_ptr<Meetings> meetings_;
    std::atomic<int64_t> next_block_{0};
    std::atomic<bool> stopped_{false};
    std::atomic<uint64_t> releases_{0};  // written with mutex_ held
    std::mutex mutex_;
    std::condition_variable progress_;
    std::string error_;
    int working_ = 0;                       // threads that have begun and not ended
    std::vector<const ThreadBlocks*> idle_;  // threads that found nothing to run since the last release

    void work();
    bool advance(BlockRun& block);
    bool run_fiber(CoreFiber& fiber, int number);
    bool advance_suspended(ThreadBlocks& mine);
    bool begin_block(ThreadBlocks& mine);
    void retire(ThreadBlocks& mine, std::unique_ptr<BlockRun> block);
    void check_block_end(BlockRun& block);
    void wait_for_release(const ThreadBlocks& mine, uint64_t seen);
    void check_deadlock();
    static void run_body(void* fiber);
};

}  // namespace ascendc_host
