#include "runtime.h"

#include <sys/mman.h>

#include <atomic>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core.h"
#include "fiber.h"
#include "monitor.h"
#include "workers.h"

namespace ascendc_host {

__thread Core* current_core = nullptr;

namespace {

constexpr int kNoType = -1;
constexpr size_t kLongestReport = 1000;

bool takes_part(int type, int core) {
    if (type == KERNEL_TYPE_MIX_AIC_1_2) return true;
    return type == KERNEL_TYPE_AIC_ONLY ? core == kCubeInBlock : core == 0;
}

// Local memories of one core, mapped on first touch and kept per thread.
constexpr uint32_t kArenaBytes = kMemoryBytes[0] + kMemoryBytes[1] + kMemoryBytes[2] + kMemoryBytes[3] + kMemoryBytes[4];
thread_local std::vector<uint8_t*> free_arenas;

uint8_t* take_arena() {
    if (!free_arenas.empty()) {
        uint8_t* arena = free_arenas.back();
        free_arenas.pop_back();
        return arena;
    }
    void* memory = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    return static_cast<uint8_t*>(memory);
}

}  // namespace

// Flags of one core. Sets that need both vector cores are collected in `arrived` until the partner has set too.
struct CrossCoreFlags {
    std::vector<Clock> ready[kCrossCoreFlags];                 // one per set that may be waited for
    std::vector<Clock> arrived[2][kCrossCoreFlags];            // by mode 1 and mode 2
    int group_sets[kCrossCoreFlags] = {}, group_waits[kCrossCoreFlags] = {};  // mode 0
    Site last_set[kCrossCoreFlags] = {};
};

struct CoreFiber {
    enum State { kNew, kReady, kBlocked, kDone } state = kNew;
    Fiber fiber;
    Core core = {};
    CrossCoreFlags flags;
    uint8_t* arena = nullptr;
    std::function<bool()> unblocked;
    std::string waits_for;
    int sync_all_count[2] = {};
    struct BlockRun* block = nullptr;
};

struct BlockRun {
    CoreFiber fibers[kCoresPerBlock];
};

// Cores that wait for one another across blocks, one generation after another. Guarded by Launch::mutex_.
struct Rendezvous {
    std::vector<int> arrivals;
    std::vector<Clock> clocks;
    std::atomic<int> released{0};
};

class Launch {
 public:
    Launch(const LaunchOptions& options, bool checked, KernelBody body, const void* arguments)
        : options_(options), body_(body), arguments_(arguments), checked_(checked) {
        if (checked) monitor_ = std::make_unique<Monitor>(options.blocks);
    }

    std::string run() {
        const int threads = checked_ ? 1 : int(std::min<int64_t>(options_.threads, options_.blocks));
        working_ = threads;
        waiting_.resize(threads);
        run_on_workers(threads, [this](int number) { work(number); });
        return error_;
    }

    // From fibers.
    void declare(KernelType type, Site site);
    void wait(std::string waits_for, std::function<bool()> unblocked);
    void meet(Rendezvous& meeting, int generation, int cores, const Clock& clock);
    int cores_in_launch(bool vector, bool cube) const;
    void record_error(const std::string& error);
    [[noreturn]] void leave();

    const LaunchOptions options_;
    std::atomic<int> type_{kNoType};
    std::unique_ptr<Monitor> monitor_;
    Rendezvous group_flags_[2][kCrossCoreFlags], sync_all_[2];  // by kind of core; by vector_only

 private:
    const KernelBody body_;
    const void* const arguments_;
    const bool checked_;
    std::atomic<int64_t> next_block_{0};
    std::atomic<bool> stopped_{false};
    std::mutex mutex_;
    std::condition_variable progress_;
    std::string error_;
    std::vector<std::string> waiting_;  // by worker: what its cores waited for when it last went idle
    uint64_t releases_ = 0;
    int working_ = 0, idle_ = 0;  // idle_: since the last release

    void work(int number);
    bool advance(BlockRun& block);
    bool run_fiber(CoreFiber& fiber, int number);
    void start_fiber(CoreFiber& fiber);
    void check_block_end(BlockRun& block);
    void wait_for_release(int number, const std::vector<std::unique_ptr<BlockRun>>& blocks, uint64_t seen);
    void check_deadlock();
    std::unique_ptr<BlockRun> new_block();
    static void run_body(void* fiber);
    uint64_t releases() {
        std::lock_guard<std::mutex> lock(mutex_);
        return releases_;
    }
};

namespace {

CoreFiber& current_fiber() { return *current_core->fiber; }

void check_queues(const Core& core) {
    for (int i = 0; i < core.buffer_count; ++i) {
        const Buffer& buffer = core.buffers[i];
        if (buffer.state == BufferState::kOpen || buffer.state == BufferState::kFree) continue;
        const char* missing = buffer.state == BufferState::kAllocated ? "EnQue or FreeTensor"
                              : buffer.state == BufferState::kQueued  ? "DeQue"
                                                                      : "FreeTensor";
        fail("end of kernel", buffer.last_step, "%s is still %s: %s is missing", describe(buffer).c_str(),
             kBufferStateName[int(buffer.state)], missing);
    }
}

}  // namespace

void Launch::run_body(void* argument) {
    CoreFiber& me = *static_cast<CoreFiber*>(argument);
    Launch& launch = *me.core.launch;
    launch.body_(launch.arguments_);
    if (launch.type_ == kNoType) fail("kernel", {launch.options_.kernel, 0}, "KERNEL_TASK_TYPE_DEFAULT is missing");
    if (launch.checked_) {
        check_queues(me.core);
        launch.monitor_->check_end(me.core);
    }
    launch.leave();
}

void Launch::leave() {
    CoreFiber& me = current_fiber();
    me.state = CoreFiber::kDone;
    me.fiber.leave();
}

void Launch::record_error(const std::string& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_.empty()) error_ = error;
    stopped_ = true;
    progress_.notify_all();
}

void Launch::declare(KernelType type, Site site) {
    int expected = kNoType;
    if (!type_.compare_exchange_strong(expected, type) && expected != type)
        fail("KERNEL_TASK_TYPE_DEFAULT", site, "kernel type %d was declared before as %d", int(type), expected);
    const Core& me = core();
    if (!takes_part(type, me.kind == CoreKind::kCube ? kCubeInBlock : me.sub_block)) leave();
}

void Launch::wait(std::string waits_for, std::function<bool()> unblocked) {
    if (unblocked()) return;
    CoreFiber& me = current_fiber();
    me.waits_for = std::move(waits_for);
    me.unblocked = std::move(unblocked);
    me.state = CoreFiber::kBlocked;
    me.fiber.suspend();
}

void Launch::meet(Rendezvous& meeting, int generation, int cores, const Clock& clock) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (int(meeting.arrivals.size()) <= generation) {
        meeting.arrivals.resize(generation + 1, 0);
        meeting.clocks.resize(generation + 1);
    }
    Monitor::join(meeting.clocks[generation], clock);
    if (++meeting.arrivals[generation] < cores) return;
    meeting.released = generation + 1;
    ++releases_;
    idle_ = 0;
    progress_.notify_all();
}

int Launch::cores_in_launch(bool vector, bool cube) const {
    const int type = type_;
    int cores = 0;
    for (int c = 0; c < kCoresPerBlock; ++c) cores += takes_part(type, c) && (c == kCubeInBlock ? cube : vector);
    return cores * int(options_.blocks);
}

std::unique_ptr<BlockRun> Launch::new_block() {
    const int64_t number = next_block_++;
    if (number >= options_.blocks) return nullptr;
    auto block = std::make_unique<BlockRun>();
    for (int c = 0; c < kCoresPerBlock; ++c) {
        block->fibers[c].block = block.get();
        Core& core = block->fibers[c].core;
        core.fiber = &block->fibers[c];
        core.kind = c == kCubeInBlock ? CoreKind::kCube : CoreKind::kVector;
        core.block = number;
        core.sub_block = c == kCubeInBlock ? 0 : c;
        core.number = int(number) * kCoresPerBlock + c;
        core.launch = this;
        core.monitor = monitor_.get();
        core.mask = VectorMask();
    }
    return block;
}

void Launch::start_fiber(CoreFiber& fiber) {
    fiber.arena = take_arena();
    uint8_t* at = fiber.arena;
    for (int m = 0; m < kMemories; at += kMemoryBytes[m++]) fiber.core.memory[m] = at;
    fiber.fiber.start(run_body, &fiber);
}

// True if the fiber ran.
bool Launch::run_fiber(CoreFiber& fiber, int number) {
    if (fiber.state == CoreFiber::kDone) return false;
    if (fiber.state == CoreFiber::kBlocked && !fiber.unblocked()) return false;
    if (fiber.state == CoreFiber::kNew) {
        const int type = type_;
        if (type == kNoType && number != 0) return false;  // vector core 0 declares the type
        if (type != kNoType && !takes_part(type, number)) {
            fiber.state = CoreFiber::kDone;
            return true;
        }
        start_fiber(fiber);
    }
    fiber.state = CoreFiber::kReady;
    current_core = &fiber.core;
    fiber.fiber.resume();
    current_core = nullptr;
    if (fiber.state == CoreFiber::kDone) {
        fiber.fiber.release();
        free_arenas.push_back(fiber.arena);
    }
    return true;
}

bool Launch::advance(BlockRun& block) {
    bool ran = false;
    for (int c = 0; c < kCoresPerBlock && !stopped_; ++c) ran |= run_fiber(block.fibers[c], c);
    return ran;
}

void Launch::check_block_end(BlockRun& block) {
    if (!checked_) return;
    for (CoreFiber& fiber : block.fibers)
        for (int flag = 0; flag < kCrossCoreFlags; ++flag) {
            const size_t unused = fiber.flags.ready[flag].size();
            if (unused)
                record_error(std::string(options_.kernel) + ", " + core_name(fiber.core.number) + ": flag " + std::to_string(flag) + " was set " +
                             std::to_string(unused) + " times more than waited for, last at " + describe(fiber.flags.last_set[flag]) +
                             ": CrossCoreWaitFlag is missing");
        }
}

// With mutex_ held: nobody runs, so nobody will be released.
void Launch::check_deadlock() {
    if (idle_ == 0 || idle_ < working_) return;
    if (error_.empty()) error_ = std::string(options_.kernel) + ": deadlock:";
    for (const std::string& worker : waiting_)
        if (!stopped_) error_ += worker;
    stopped_ = true;
    progress_.notify_all();
}

void Launch::wait_for_release(int number, const std::vector<std::unique_ptr<BlockRun>>& blocks, uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (releases_ != seen || stopped_) return;
    std::string& waiting = waiting_[number];
    waiting.clear();
    for (const auto& block : blocks)
        for (const CoreFiber& fiber : block->fibers)
            if (fiber.state == CoreFiber::kBlocked && waiting.size() < kLongestReport)
                waiting += "\n  " + core_name(fiber.core.number) + " waits for " + fiber.waits_for;
    ++idle_;
    check_deadlock();
    progress_.wait(lock, [&] { return releases_ != seen || stopped_; });
    waiting.clear();
}

void Launch::work(int number) {
    std::vector<std::unique_ptr<BlockRun>> blocks;
    while (!stopped_) {
        const uint64_t seen = releases();
        bool ran = false;
        for (auto& block : blocks) ran |= advance(*block);
        for (size_t i = 0; i < blocks.size();) {
            bool done = true;
            for (const CoreFiber& fiber : blocks[i]->fibers) done &= fiber.state == CoreFiber::kDone;
            if (done && !stopped_) check_block_end(*blocks[i]);
            if (done)
                blocks.erase(blocks.begin() + i);
            else
                ++i;
        }
        if (ran) continue;
        if (auto block = new_block())
            blocks.push_back(std::move(block));
        else if (blocks.empty())
            break;
        else
            wait_for_release(number, blocks, seen);
    }
    for (auto& block : blocks)  // abandoned fibers of a failed launch
        for (CoreFiber& fiber : block->fibers)
            if (fiber.fiber.started() && fiber.state != CoreFiber::kDone) free_arenas.push_back(fiber.arena);
    std::lock_guard<std::mutex> lock(mutex_);
    --working_;
    check_deadlock();
}

const char* launch_blocks(const LaunchOptions& options, bool checked, KernelBody body, const void* arguments) {
    static thread_local std::string error;
    if (options.blocks < 1 || options.threads < 1)
        error = std::string(options.kernel) + ": blocks=" + std::to_string(options.blocks) + " and threads=" +
                std::to_string(options.threads) + " must be at least 1";
    else
        error = Launch(options, checked, body, arguments).run();
    return error.empty() ? nullptr : error.c_str();
}

void fail(const char* function, Site site, const char* format, ...) {
    char text[2048];
    va_list values;
    va_start(values, format);
    std::vsnprintf(text, sizeof(text), format, values);
    va_end(values);
    Launch& launch = *core().launch;
    const std::string place = core_name(core().number) + ": " + function + " at " + describe(site);
    launch.record_error(std::string(launch.options_.kernel) + ", " + place + ": " + text);
    launch.leave();
}

int64_t block_count() { return core().launch->options_.blocks; }

int mmad_order() { return core().launch->options_.mmad_order; }

int64_t task_ratio() {
    return core().kind == CoreKind::kVector && core().launch->type_ == KERNEL_TYPE_MIX_AIC_1_2 ? kVectorCores : 1;
}

void declare_kernel_type(KernelType type, Site site) { core().launch->declare(type, site); }

// ---- between cores

namespace {

void require_cross_core(const char* function, Site site) {
    const int type = core().launch->type_;
    if (type == KERNEL_TYPE_AIV_ONLY || type == KERNEL_TYPE_AIC_ONLY)
        fail(function, site, "the hardware has no cross-core scheduler for KERNEL_TYPE_AIV_ONLY and KERNEL_TYPE_AIC_ONLY; use a MIX type");
}

void release(CoreFiber& to, uint16_t flag, const Clock& clock, Site site) {
    if (to.flags.ready[flag].size() >= kCrossCoreFlagMax)
        fail("CrossCoreSetFlag", site, "flag %d of %s was set more than %d times without a wait", int(flag), core_name(to.core.number).c_str(),
             kCrossCoreFlagMax);
    to.flags.ready[flag].push_back(clock);
    to.flags.last_set[flag] = site;
}

// Modes 1 and 2 from a vector core: takes effect when both vector cores have set.
void set_by_vector_core(CoreFiber& me, int mode, uint16_t flag, const Clock& clock, Site site) {
    CoreFiber* fibers = me.block->fibers;
    me.flags.arrived[mode - 1][flag].push_back(clock);
    auto& first = fibers[0].flags.arrived[mode - 1][flag];
    auto& second = fibers[1].flags.arrived[mode - 1][flag];
    if (first.empty() || second.empty()) return;
    Clock both = first.front();
    Monitor::join(both, second.front());
    first.erase(first.begin());
    second.erase(second.begin());
    if (mode == 2) return release(fibers[kCubeInBlock], flag, both, site);
    for (int v = 0; v < kVectorCores; ++v) release(fibers[v], flag, both, site);
}

void set_by_cube_core(CoreFiber& me, int mode, uint16_t flag, const Clock& clock, Site site) {
    if (mode != 2) fail("CrossCoreSetFlag", site, "mode %d is not for a cube core", mode);
    for (int v = 0; v < kVectorCores; ++v) release(me.block->fibers[v], flag, clock, site);
}

}  // namespace

void cross_core_set(int mode, pipe_t pipe, uint16_t flag, Site site) {
    require_cross_core("CrossCoreSetFlag", site);
    if (flag >= kCrossCoreFlags) fail("CrossCoreSetFlag", site, "flag %d is not below %d", int(flag), kCrossCoreFlags);
    CoreFiber& me = current_fiber();
    Launch& launch = *me.core.launch;
    const Clock clock = me.core.monitor ? me.core.monitor->completed(me.core, pipe) : Clock();
    const bool vector = me.core.kind == CoreKind::kVector;
    if (mode == 0)
        launch.meet(launch.group_flags_[vector][flag], me.flags.group_sets[flag]++, launch.cores_in_launch(vector, !vector), clock);
    else if (launch.type_ != KERNEL_TYPE_MIX_AIC_1_2)
        fail("CrossCoreSetFlag", site, "mode %d needs KERNEL_TYPE_MIX_AIC_1_2", mode);
    else if (vector)
        set_by_vector_core(me, mode, flag, clock, site);
    else
        set_by_cube_core(me, mode, flag, clock, site);
}

void cross_core_wait(uint16_t flag, Site site) {
    require_cross_core("CrossCoreWaitFlag", site);
    if (flag >= kCrossCoreFlags) fail("CrossCoreWaitFlag", site, "flag %d is not below %d", int(flag), kCrossCoreFlags);
    CoreFiber& me = current_fiber();
    Launch& launch = *me.core.launch;
    Rendezvous& group = launch.group_flags_[me.core.kind == CoreKind::kVector][flag];
    const auto from_group = [&me, &group, flag] { return group.released > me.flags.group_waits[flag]; };
    launch.wait("CrossCoreWaitFlag(" + std::to_string(flag) + ") at " + describe(site),
                [&me, from_group, flag] { return !me.flags.ready[flag].empty() || from_group(); });
    Clock clock;
    if (!me.flags.ready[flag].empty()) {
        clock = me.flags.ready[flag].front();
        me.flags.ready[flag].erase(me.flags.ready[flag].begin());
    } else {
        const int generation = me.flags.group_waits[flag]++;
        if (me.core.monitor) clock = group.clocks[generation];
    }
    if (me.core.monitor) me.core.monitor->join_core(me.core, clock);
}

void sync_all(bool vector_only, Site site) {
    require_cross_core("SyncAll", site);
    CoreFiber& me = current_fiber();
    Launch& launch = *me.core.launch;
    const bool mixed = launch.type_ == KERNEL_TYPE_MIX_AIC_1_2;
    if (vector_only && me.core.kind == CoreKind::kCube) fail("SyncAll", site, "isAIVOnly=true on a cube core");
    if (!vector_only && !mixed) fail("SyncAll", site, "isAIVOnly=false needs KERNEL_TYPE_MIX_AIC_1_2: a vector kernel would hang");
    Monitor* monitor = me.core.monitor;
    if (monitor) monitor->barrier(me.core, PIPE_ALL);
    Rendezvous& meeting = launch.sync_all_[vector_only];
    const int generation = me.sync_all_count[vector_only]++;
    launch.meet(meeting, generation, launch.cores_in_launch(true, !vector_only), monitor ? monitor->completed(me.core, PIPE_ALL) : Clock());
    launch.wait("SyncAll at " + describe(site), [&meeting, generation] { return meeting.released > generation; });
    if (monitor) monitor->join_core(me.core, meeting.clocks[generation]);
}

}  // namespace ascendc_host
