// What a binding hands to a kernel library, as plain data: kernel libraries know nothing of torch.
#pragma once
#include <cstdint>

namespace megatron_ext {

// Threads of the caller: calls task(context, i) for i in [0, tasks), some of them at once, and returns when all have returned.
struct Threads {
    int32_t count;
    void (*run)(int64_t tasks, void (*task)(void* context, int64_t i), void* context);
};

struct KernelCall {
    void* const* operands;  // in the order of the kernel's parameters
    const void* tiling;     // the operator's tiling struct
    int64_t blocks;
    Threads threads;     // CPU
    int32_t mmad_order;  // CPU; on a device the hardware has its own
    void* stream;        // device
};

// Returns nullptr, or what went wrong; the text lives until this thread's next call.
using KernelFunction = const char* (*)(const KernelCall*);

}  // namespace megatron_ext
