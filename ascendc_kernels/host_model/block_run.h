// The cores of one block as fibers, with their local memories and their flags. Kept per thread from launch to launch.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "core.h"
#include "fiber.h"
#include "monitor.h"

namespace ascendc_host {

// Sets of one flag that nobody has waited for. The clocks are those of the checked flavour, one per set.
struct PendingSets {
    int count = 0;
    std::vector<Clock> clocks;

    void push(const Core& core, Clock clock) {
        ++count;
        if (core.monitor) clocks.push_back(std::move(clock));
    }
    Clock pop() {
        --count;
        if (clocks.empty()) return Clock();
        Clock first = std::move(clocks.front());
        clocks.erase(clocks.begin());
        return first;
    }
};

// One flag of one core. Sets that need both vector cores are collected in `arrived` until the partner has set too.
struct CrossCoreFlag {
    PendingSets ready, arrived[2];         // arrived: by mode 1 and mode 2
    int group_sets = 0, group_waits = 0;  // mode 0
    Site last_set = {"", 0};
};

// The flags of one core; those that were touched are cleared for the next launch.
class CrossCoreFlags {
 public:
    CrossCoreFlag& operator[](int flag) {
        touched_ |= 1u << flag;
        return flags_[flag];
    }
    void clear() {
        for (; touched_; touched_ &= touched_ - 1) flags_[__builtin_ctz(touched_)] = CrossCoreFlag();
    }

 private:
    CrossCoreFlag flags_[kCrossCoreFlags];
    uint32_t touched_ = 0;
    static_assert(kCrossCoreFlags <= 32, "one bit each");
};

// Cores that wait for one another across blocks, one generation after another. Guarded by the mutex of the launch, but for `released`.
struct Rendezvous {
    struct Generation {
        int arrivals = 0;
        Clock clock;
    };
    std::vector<Generation> generations;
    std::atomic<int> released{0};
};

// What a suspended core waits for: a generation of a rendezvous, or a set of a flag.
struct Condition {
    const char* function = "";
    int flag = -1;
    Site site = {"", 0};
    const Rendezvous* meeting = nullptr;
    int generation = 0;
    const PendingSets* sets = nullptr;

    bool holds() const { return (sets && sets->count > 0) || meeting->released > generation; }
};

struct CoreFiber {
    enum State { kNew, kReady, kBlocked, kDone } state = kNew;
    struct BlockRun* block = nullptr;
    Condition waits_for;
    Core core = {};
    Fiber fiber;
    CrossCoreFlags flags;
    int sync_all_count[2] = {};  // by vector_only

    CoreFiber() = default;
    CoreFiber(const CoreFiber&) = delete;
    ~CoreFiber();
    // New, with empty memories; what an earlier launch left is forgotten.
    void reset(Launch* launch, Monitor* monitor, int64_t block, int core_in_block);
    void start(void (*body)(void*));

 private:
    uint8_t* arena_ = nullptr;  // all local memories, mapped on first touch
};

struct BlockRun {
    CoreFiber fibers[kCoresPerBlock];
    bool done() const;
};

// Blocks of one thread.
struct ThreadBlocks {
    std::vector<std::unique_ptr<BlockRun>> suspended, spare;
    std::unique_ptr<BlockRun> take();
};
ThreadBlocks& thread_blocks();

}  // namespace ascendc_host
