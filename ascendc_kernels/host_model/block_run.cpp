#include "block_run.h"

#include <sys/mman.h>

#include <cstdlib>

namespace ascendc_host {
namespace {

constexpr uint32_t kArenaBytes = kMemoryBytes[0] + kMemoryBytes[1] + kMemoryBytes[2] + kMemoryBytes[3] + kMemoryBytes[4];

uint8_t* map_arena() {
    void* memory = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    return static_cast<uint8_t*>(memory);
}

}  // namespace

CoreFiber::~CoreFiber() {
    if (arena_) munmap(arena_, kArenaBytes);
}

void CoreFiber::reset(Launch* launch, Monitor* monitor, int64_t block, int core_in_block) {
    state = kNew;
    flags.clear();
    for (int& count : sync_all_count) count = 0;
    const bool cube = core_in_block == kCubeInBlock;
    core.kind = cube ? CoreKind::kCube : CoreKind::kVector;
    core.block = block;
    core.sub_block = cube ? 0 : core_in_block;
    core.number = int(block) * kCoresPerBlock + core_in_block;
    core.launch = launch;
    core.fiber = this;
    core.monitor = monitor;
    for (uint32_t& used : core.used) used = 0;
    core.buffer_count = 0;
    core.mask = VectorMask();
}

void CoreFiber::start(void (*body)(void*)) {
    if (arena_ == nullptr) {
        arena_ = map_arena();
        uint8_t* at = arena_;
        for (int m = 0; m < kMemories; at += kMemoryBytes[m++]) core.memory[m] = at;
    }
    fiber.start(body, this);
}

bool BlockRun::done() const {
    for (const CoreFiber& fiber : fibers)
        if (fiber.state != CoreFiber::kDone) return false;
    return true;
}

std::unique_ptr<BlockRun> ThreadBlocks::take() {
    if (spare.empty()) {
        auto block = std::make_unique<BlockRun>();
        for (CoreFiber& fiber : block->fibers) fiber.block = block.get();
        return block;
    }
    std::unique_ptr<BlockRun> block = std::move(spare.back());
    spare.pop_back();
    return block;
}

ThreadBlocks& thread_blocks() {
    static thread_local ThreadBlocks blocks;
    return blocks;
}

}  // namespace ascendc_host
