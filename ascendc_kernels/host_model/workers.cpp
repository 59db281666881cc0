#include "workers.h"

#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>

namespace ascendc_host {
namespace {

class Pool {
 public:
    void run(int threads, const std::function<void(int)>& work) {
        std::unique_lock<std::mutex> lock(mutex_);
        idle_.wait(lock, [&] { return work_ == nullptr; });
        for (; started_ < threads - 1; ++started_) std::thread(&Pool::loop, this, started_ + 1).detach();
        work_ = &work;
        wanted_ = threads - 1;
        running_ = threads - 1;
        ++generation_;
        wake_.notify_all();
        lock.unlock();
        work(0);
        lock.lock();
        finished_.wait(lock, [&] { return running_ == 0; });
        work_ = nullptr;
        idle_.notify_one();
    }

 private:
    std::mutex mutex_;
    std::condition_variable wake_, finished_, idle_;
    const std::function<void(int)>* work_ = nullptr;
    int started_ = 0, wanted_ = 0, running_ = 0;
    uint64_t generation_ = 0;

    void loop(int number) {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return generation_ != seen; });
            seen = generation_;
            if (number > wanted_) continue;
            const std::function<void(int)>& work = *work_;
            lock.unlock();
            work(number);
            lock.lock();
            if (--running_ == 0) finished_.notify_one();
        }
    }
};

// Threads do not survive fork(): a child process gets a pool of its own. Never freed, since detached threads use it until the end.
Pool& pool() {
    static std::mutex mutex;
    static Pool* current = nullptr;
    static pid_t owner = 0;
    std::lock_guard<std::mutex> lock(mutex);
    if (owner != getpid()) {
        current = new Pool;
        owner = getpid();
    }
    return *current;
}

}  // namespace

void run_on_workers(int threads, const std::function<void(int)>& work) {
    if (threads <= 1)
        work(0);
    else
        pool().run(threads, work);
}

}  // namespace ascendc_host
