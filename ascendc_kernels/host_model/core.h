// State of one simulated core, as modelled functions see it. The scheduler behind it is in runtime.cpp.
#pragma once
#include "failure.h"
#include "kernel_types.h"

namespace ascendc_host {

enum class CoreKind : uint8_t { kCube, kVector };

// Where a queue buffer stands. kOpen: a TBuf, always accessible.
enum class BufferState : uint8_t { kOpen, kFree, kAllocated, kQueued, kDequeued };
constexpr const char* kBufferStateName[] = {"open", "free", "allocated", "queued", "dequeued"};

// Cores are numbered through the launch: two vector cores, then the cube core of each block.
constexpr int kVectorCores = 2;
constexpr int kCubeInBlock = kVectorCores;
constexpr int kCoresPerBlock = kVectorCores + 1;

struct Buffer {
    uint8_t* start = nullptr;
    uint32_t bytes = 0;
    Memory memory = Memory::kUb;
    AscendC::TPosition position = AscendC::TPosition::VECCALC;
    BufferState state = BufferState::kOpen;
    int index = 0;       // among the buffers of its queue
    int event_id = -1;   // of its pending EnQue or FreeTensor
    Site created = {"", 0};
    Site last_step = {"", 0};
};

struct VectorMask {
    uint64_t low = ~uint64_t(0), high = ~uint64_t(0);
    bool counter = false;
};

class Launch;
class Monitor;
struct CoreFiber;

struct Core {
    CoreKind kind;
    int64_t block;
    int sub_block;
    int number;
    Launch* launch;
    CoreFiber* fiber;
    Monitor* monitor;  // checked flavour only
    uint8_t* memory[kMemories];
    uint32_t used[kMemories];
    Buffer buffers[kMaxBuffers];
    int buffer_count;
    VectorMask mask;
};

extern __thread Core* current_core;
inline Core& core() { return *current_core; }

// Questions about the launch, answered by the scheduler.
int64_t block_count();
int64_t task_ratio();
int mmad_order();
void declare_kernel_type(KernelType type, Site site);

// Synchronisation between cores; they suspend the fiber until their condition holds.
void cross_core_set(int mode, pipe_t pipe, uint16_t flag, Site site);
void cross_core_wait(uint16_t flag, Site site);
void sync_all(bool vector_only, Site site);

}  // namespace ascendc_host
