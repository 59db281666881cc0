#include "fiber.h"

#include <sys/mman.h>

#include <cstdlib>
#include <vector>

namespace ascendc_host {
namespace {

constexpr size_t kGuardBytes = 4096;
thread_local std::vector<uint8_t*> free_stacks;

uint8_t* map_stack() {
    void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    mprotect(memory, kGuardBytes, PROT_NONE);  // an overflow faults instead of writing into a neighbour
    return static_cast<uint8_t*>(memory);
}

}  // namespace

uint8_t* take_stack() {
    if (free_stacks.empty()) return map_stack();
    uint8_t* stack = free_stacks.back();
    free_stacks.pop_back();
    return stack;
}

void return_stack(uint8_t* stack) { free_stacks.push_back(stack); }

void Fiber::enter(unsigned high, unsigned low) {
    Fiber* fiber = reinterpret_cast<Fiber*>(uintptr_t(high) << 32 | low);
    fiber->body_(fiber->argument_);
    std::abort();  // body must leave()
}

void Fiber::start(void (*body)(void*), void* argument) {
    stack_ = take_stack();
    body_ = body;
    argument_ = argument;
    getcontext(&own_);
    own_.uc_stack.ss_sp = stack_;
    own_.uc_stack.ss_size = kStackBytes;
    own_.uc_link = nullptr;
    const uintptr_t address = reinterpret_cast<uintptr_t>(this);
    makecontext(&own_, reinterpret_cast<void (*)()>(&Fiber::enter), 2, unsigned(address >> 32), unsigned(address));
}

void Fiber::resume() { swapcontext(&scheduler_, &own_); }

void Fiber::suspend() { swapcontext(&own_, &scheduler_); }

void Fiber::leave() {
    suspend();
    std::abort();  // a fiber that left is never resumed
}

void Fiber::release() {
    if (stack_) return_stack(stack_);
    stack_ = nullptr;
}

}  // namespace ascendc_host
