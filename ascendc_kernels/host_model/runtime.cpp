#include "runtime.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "launch_state.h"
#include "workers.h"

namespace ascendc_host {

__thread Core* current_core = nullptr;

namespace {

constexpr size_t kLongestReport = 1000;

bool takes_part(int type, int core) {
    if (type == KERNEL_TYPE_MIX_AIC_1_2) return true;
    return type == KERNEL_TYPE_AIC_ONLY ? core == kCubeInBlock : core == 0;
}

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

std::string describe(const Condition& condition) {
    const std::string flag = condition.flag < 0 ? "" : "(" + std::to_string(condition.flag) + ")";
    return condition.function + flag + " at " + describe(condition.site);
}

}  // namespace

Launch::Launch(const LaunchOptions& options, bool checked, KernelBody body, const void* arguments)
    : options_(options), body_(body), arguments_(arguments), checked_(checked) {
    if (checked) monitor_ = std::make_unique<Monitor>(options.blocks);
}

std::string Launch::run() {
    Workers workers(checked_ ? 1 : int(std::min<int64_t>(options_.threads, options_.blocks)));
    share_ = (options_.blocks + workers.threads() - 1) / workers.threads();
    workers.run([](void* launch) { static_cast<Launch*>(launch)->work(); }, this);
    return std::move(error_);
}

// ---- from fibers

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
    CoreFiber& me = *core().fiber;
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
    int declared = type_;
    if (declared == kNoType) {
        std::lock_guard<std::mutex> lock(mutex_);
        const bool mixed = type == KERNEL_TYPE_MIX_AIC_1_2 || type == KERNEL_TYPE_MIX_AIV_1_0;
        if (mixed && !meetings_) meetings_ = std::make_unique<Meetings>();
        if (type_.compare_exchange_strong(declared, type)) declared = type;
    }
    if (declared != type) fail("KERNEL_TASK_TYPE_DEFAULT", site, "kernel type %d was declared before as %d", int(type), declared);
    const Core& me = core();
    if (!takes_part(type, me.kind == CoreKind::kCube ? kCubeInBlock : me.sub_block)) leave();
}

void Launch::wait(const Condition& condition) {
    if (condition.holds()) return;
    CoreFiber& me = *core().fiber;
    me.waits_for = condition;
    me.state = CoreFiber::kBlocked;
    me.fiber.suspend();
}

void Launch::meet(Rendezvous& meeting, int generation, int cores, const Clock& clock) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (int(meeting.generations.size()) <= generation) meeting.generations.resize(generation + 1);
    Rendezvous::Generation& arrived = meeting.generations[generation];
    Monitor::join(arrived.clock, clock);
    if (++arrived.arrivals < cores) return;
    meeting.released = generation + 1;
    ++releases_;
    idle_.clear();
    progress_.notify_all();
}

int Launch::cores_in_launch(bool vector, bool cube) const {
    const int type = type_;
    int cores = 0;
    for (int c = 0; c < kCoresPerBlock; ++c) cores += takes_part(type, c) && (c == kCubeInBlock ? cube : vector);
    return cores * int(options_.blocks);
}

// ---- the scheduler

// True if the fiber ran.
bool Launch::run_fiber(CoreFiber& fiber, int number) {
    if (fiber.state == CoreFiber::kDone) return false;
    if (fiber.state == CoreFiber::kBlocked && !fiber.waits_for.holds()) return false;
    if (fiber.state == CoreFiber::kNew) {
        const int type = type_;
        if (type == kNoType && number != 0) return false;  // vector core 0 declares the type
        if (type != kNoType && !takes_part(type, number)) {
            fiber.state = CoreFiber::kDone;
            return true;
        }
        fiber.start(run_body);
    }
    fiber.state = CoreFiber::kReady;
    current_core = &fiber.core;
    fiber.fiber.resume();
    current_core = nullptr;
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
            const int unused = fiber.flags[flag].ready.count;
            if (unused)
                record_error(std::string(options_.kernel) + ", " + core_name(fiber.core.number) + ": flag " + std::to_string(flag) + " was set " +
                             std::to_string(unused) + " times more than waited for, last at " + describe(fiber.flags[flag].last_set) +
                             ": CrossCoreWaitFlag is missing");
        }
}

void Launch::retire(ThreadBlocks& mine, std::unique_ptr<BlockRun> block) {
    if (!stopped_) check_block_end(*block);
    mine.spare.push_back(std::move(block));
}

// True if a core ran.
bool Launch::advance_suspended(ThreadBlocks& mine) {
    bool ran = false;
    for (size_t i = 0; i < mine.suspended.size();) {
        ran |= advance(*mine.suspended[i]);
        if (mine.suspended[i]->done()) {
            retire(mine, std::move(mine.suspended[i]));
            mine.suspended.erase(mine.suspended.begin() + i);
        } else {
            ++i;
        }
    }
    return ran;
}

// False if no block is left.
bool Launch::begin_block(ThreadBlocks& mine) {
    const int64_t number = next_block_++;
    if (number >= options_.blocks) return false;
    std::unique_ptr<BlockRun> block = mine.take();
    for (int c = 0; c < kCoresPerBlock; ++c) block->fibers[c].reset(this, monitor_.get(), number, c);
    advance(*block);
    if (block->done())
        retire(mine, std::move(block));
    else
        mine.suspended.push_back(std::move(block));
    return true;
}

// With mutex_ held: nobody runs and no block is left to begin, so nobody will be released.
void Launch::check_deadlock() {
    if (stopped_ || idle_.empty() || int(idle_.size()) < working_ || next_block_ < options_.blocks) return;
    std::vector<const CoreFiber*> waiting;
    for (const ThreadBlocks* thread : idle_)
        for (const auto& block : thread->suspended)
            for (const CoreFiber& fiber : block->fibers)
                if (fiber.state == CoreFiber::kBlocked) waiting.push_back(&fiber);
    std::sort(waiting.begin(), waiting.end(), [](const CoreFiber* a, const CoreFiber* b) { return a->core.number < b->core.number; });
    error_ = std::string(options_.kernel) + ": deadlock:";
    for (const CoreFiber* fiber : waiting)
        if (error_.size() < kLongestReport) error_ += "\n  " + core_name(fiber->core.number) + " waits for " + describe(fiber->waits_for);
    stopped_ = true;
    progress_.notify_all();
}

void Launch::wait_for_release(const ThreadBlocks& mine, uint64_t seen) {
    const auto over = [&] { return releases_ != seen || stopped_; };
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (over()) return;
        idle_.push_back(&mine);
        check_deadlock();
    }
    for (Spin spin; !over();)
        if (!spin.again()) {
            std::unique_lock<std::mutex> lock(mutex_);
            progress_.wait(lock, over);
        }
}

// On each thread of the launch.
void Launch::work() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ++working_;
    }
    ThreadBlocks& mine = thread_blocks();
    while (!stopped_) {
        const uint64_t seen = releases_;
        if (advance_suspended(mine)) continue;
        // Blocks stay with their thread: what is beyond its share is left to a thread that is still waking up.
        if (int64_t(mine.suspended.size()) < share_ && begin_block(mine)) continue;
        if (mine.suspended.empty()) break;
        wait_for_release(mine, seen);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& block : mine.suspended) mine.spare.push_back(std::move(block));  // of a failed launch
    mine.suspended.clear();
    --working_;
    check_deadlock();
}

// ---- what hosts and cores ask for

namespace {

const char* keep_error(std::string error) {
    static thread_local std::string kept;
    kept = std::move(error);
    return kept.c_str();
}

}  // namespace

const char* launch_blocks(const LaunchOptions& options, bool checked, KernelBody body, const void* arguments) {
    if (options.blocks < 1 || options.threads < 1)
        return keep_error(std::string(options.kernel) + ": blocks=" + std::to_string(options.blocks) + " and threads=" +
                          std::to_string(options.threads) + " must be at least 1");
    std::string error = Launch(options, checked, body, arguments).run();
    return error.empty() ? nullptr : keep_error(std::move(error));
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

}  // namespace ascendc_host
