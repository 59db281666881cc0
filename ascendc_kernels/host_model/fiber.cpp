// Fortified longjmp takes a jump to another stack for an error.
#undef _FORTIFY_SOURCE
#include "fiber.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdlib>

namespace ascendc_host {
namespace {

constexpr size_t kGuardBytes = 4096;

uint8_t* map_stack() {
    void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    mprotect(memory, kGuardBytes, PROT_NONE);  // an overflow faults instead of writing into a neighbour
    return static_cast<uint8_t*>(memory);
}

}  // namespace

Fiber::~Fiber() {
    if (stack_) munmap(stack_, kStackBytes);
}

void Fiber::enter(unsigned high, unsigned low) { reinterpret_cast<Fiber*>(uintptr_t(high) << 32 | low)->run_bodies(); }

// The lowest frame of the stack, which never returns: a jump to it drops whatever stood above.
void Fiber::run_bodies() {
    if (_setjmp(bottom_) == 0) _longjmp(scheduler_, 1);
    body_(argument_);
    std::abort();  // body must leave()
}

// A context switch by swapcontext is two system calls; it makes the stack, jumps do the rest.
void Fiber::make_stack() {
    stack_ = map_stack();
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stack_;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    const uintptr_t address = reinterpret_cast<uintptr_t>(this);
    makecontext(&context, reinterpret_cast<void (*)()>(&Fiber::enter), 2, unsigned(address >> 32), unsigned(address));
    if (_setjmp(scheduler_) == 0) setcontext(&context);
}

void Fiber::start(void (*body)(void*), void* argument) {
    if (stack_ == nullptr) make_stack();
    body_ = body;
    argument_ = argument;
    next_ = &bottom_;
}

void Fiber::resume() {
    if (_setjmp(scheduler_) == 0) _longjmp(*next_, 1);
}

void Fiber::suspend() {
    next_ = &own_;
    if (_setjmp(own_) == 0) _longjmp(scheduler_, 1);
}

void Fiber::leave() { _longjmp(scheduler_, 1); }

}  // namespace ascendc_host
