// Cooperating call stacks: one per simulated core. A fiber stays on the thread that started it.
#pragma once
#include <ucontext.h>

#include <cstddef>
#include <cstdint>

namespace ascendc_host {

constexpr size_t kStackBytes = 256 * 1024;

// Memory that is mapped on first touch, kept per thread for the next fiber.
uint8_t* take_stack();
void return_stack(uint8_t* stack);

class Fiber {
 public:
    ~Fiber() { release(); }
    void start(void (*body)(void*), void* argument);  // prepares; the first resume() enters body, which must end in leave()
    void resume();                                    // from the scheduler, until suspend() or leave()
    void suspend();                                   // from the fiber
    [[noreturn]] void leave();                        // from the fiber, for good
    bool started() const { return stack_ != nullptr; }
    void release();

 private:
    ucontext_t own_, scheduler_;
    uint8_t* stack_ = nullptr;
    void (*body_)(void*) = nullptr;
    void* argument_ = nullptr;
    static void enter(unsigned high, unsigned low);
};

}  // namespace ascendc_host
