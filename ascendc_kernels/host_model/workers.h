// Threads kept between launches.
#pragma once

namespace ascendc_host {

// Spins for a short while, then gives its time slice away; false once it is time to sleep.
class Spin {
 public:
    bool again();

 private:
    int rounds_ = 0;
    long long started_ = 0;
};

// The right of one launch to the threads of this process. Another launch that asks meanwhile works alone, on its own thread.
class Workers {
 public:
    explicit Workers(int threads);
    ~Workers();
    Workers(const Workers&) = delete;
    Workers& operator=(const Workers&) = delete;
    int threads() const { return threads_; }  // as asked for, or fewer

    // Calls work(argument) on this thread and on the others, as they wake up. Returns when no call runs; a thread that has not begun
    // when the call on this one returns does not begin.
    void run(void (*work)(void*), void* argument);

 private:
    class Pool* pool_ = nullptr;
    int threads_ = 1;
};

}  // namespace ascendc_host
