// Cooperating call stacks: one per simulated core. A fiber stays on the thread that made it, and runs one body after another.
#pragma once
#include <csetjmp>
#include <cstddef>
#include <cstdint>

namespace ascendc_host {

constexpr size_t kStackBytes = 256 * 1024;

class Fiber {
 public:
    Fiber() = default;
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;
    ~Fiber();
    // Prepares; the next resume() enters body, which must end in leave(). A body that was suspended before is abandoned.
    void start(void (*body)(void*), void* argument);
    void resume();             // from the scheduler, until suspend() or leave()
    void suspend();            // from the fiber
    [[noreturn]] void leave();  // from the fiber, for good

 private:
    jmp_buf scheduler_, own_, bottom_;  // where resume() was called, where suspend() was called, the start of every body
    jmp_buf* next_ = nullptr;           // where resume() goes
    uint8_t* stack_ = nullptr;
    void (*body_)(void*) = nullptr;
    void* argument_ = nullptr;

    void make_stack();
    [[noreturn]] void run_bodies();
    static void enter(unsigned high, unsigned low);
};

}  // namespace ascendc_host
