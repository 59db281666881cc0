#include "workers.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace ascendc_host {
namespace {

// Operators of an eager engine follow one another within this time; to wake a thread that sleeps takes as long.
constexpr long long kSpinNanoseconds = 50 * 1000;
constexpr int kPausesPerRound = 32;

long long now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Signals are for the threads of the program.
class SignalsBlocked {
 public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
    sigset_t before_;
};

}  // namespace

bool Spin::again() {
    pause();
    if (++rounds_ % kPausesPerRound) return true;
    sched_yield();
    if (started_ == 0) started_ = now();
    return now() - started_ < kSpinNanoseconds;
}

class Pool {
 public:
    bool claim() { return !claimed_.exchange(true, std::memory_order_acquire); }
    void give_back() { claimed_.store(false, std::memory_order_release); }

    // With the claim: starts what is missing; returns how many there are.
    int grow(int workers) {
        const SignalsBlocked during;
        try {
            for (; started_ < workers; ++started_) std::thread(&Pool::loop, this, started_).detach();
        } catch (const std::system_error&) {  // no more threads for this process
        }
        return started_ < workers ? started_ : workers;
    }

    void run(int workers, void (*work)(void*), void* argument) {
        open(workers, work, argument);
        work(argument);
        close();
    }

 private:
    std::atomic<bool> claimed_{false};
    int started_ = 0;
    std::mutex mutex_;
    std::condition_variable wake_, finished_;
    std::atomic<uint64_t> generation_{0};
    std::atomic<int> inside_{0};
    void (*work_)(void*) = nullptr;  // nullptr: nothing to begin
    void* argument_ = nullptr;
    int wanted_ = 0, asleep_ = 0;

    void open(int workers, void (*work)(void*), void* argument) {
        std::lock_guard<std::mutex> lock(mutex_);
        work_ = work;
        argument_ = argument;
        wanted_ = workers;
        ++generation_;
        if (asleep_ > 0) wake_.notify_all();
    }

    void close() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            work_ = nullptr;
        }
        for (Spin spin; inside_.load(std::memory_order_acquire) > 0;)
            if (!spin.again()) {
                std::unique_lock<std::mutex> lock(mutex_);
                finished_.wait(lock, [&] { return inside_ == 0; });
            }
    }

    void wait_for_work(uint64_t seen) {
        for (Spin spin; generation_.load(std::memory_order_acquire) == seen;)
            if (!spin.again()) {
                std::unique_lock<std::mutex> lock(mutex_);
                ++asleep_;
                wake_.wait(lock, [&] { return generation_ != seen; });
                --asleep_;
            }
    }

    void loop(int number) {
        for (uint64_t seen = 0;;) {
            wait_for_work(seen);
            std::unique_lock<std::mutex> lock(mutex_);
            seen = generation_;
            if (work_ == nullptr || number >= wanted_) continue;
            ++inside_;
            void (*const work)(void*) = work_;
            void* const argument = argument_;
            lock.unlock();
            work(argument);
            lock.lock();
            if (--inside_ == 0) finished_.notify_one();
        }
    }
};

namespace {

// Never freed: detached threads use it until the process ends.
std::atomic<Pool*> the_pool{nullptr};

// Threads do not survive fork(), and a lock may be held for ever: a child process makes a pool of its own.
void forget_pool() { the_pool = nullptr; }
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, forget_pool);

Pool& pool() {
    Pool* found = the_pool;
    if (found) return *found;
    Pool* fresh = new Pool;
    if (the_pool.compare_exchange_strong(found, fresh)) return *fresh;
    delete fresh;
    return *found;
}

}  // namespace

Workers::Workers(int threads) {
    if (threads <= 1 || !pool().claim()) return;
    pool_ = &pool();
    threads_ = 1 + pool_->grow(threads - 1);
}

Workers::~Workers() {
    if (pool_) pool_->give_back();
}

void Workers::run(void (*work)(void*), void* argument) {
    if (threads_ == 1)
        work(argument);
    else
        pool_->run(threads_ - 1, work, argument);
}

}  // namespace ascendc_host
