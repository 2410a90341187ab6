#include "pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <vector>

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

// Spins before a thread that waits for work, or for the last task's end, stops spinning: about 50 us. The calls of a step
// follow each other within 1 us.
constexpr int kSpins = 1500;
// Where Python computes between the calls of a step, for up to 200 us.
constexpr int kLongSpins = 9000;
// In the longer pause between two steps, routers and schedulers may need the core. A thread then yields it again and
// again before it sleeps, for at most so long, and at most this part of the time that it has worked since the last such
// pause. Waking a thread takes time, on virtual machines perhaps more: see docs/architecture.md.
constexpr std::chrono::microseconds kMostYielding{1000};
constexpr int kYieldingPart = 4;
constexpr uint64_t kClosed = 0xffffffff;  // a ticket's index while the next job is being written

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Job number << 32 | next task of one thread's run. A thread takes a task by adding 1 with compare-and-swap, which
// fails once the job has changed: a late thread never runs one job's task with another job's function. So a call need
// not wait for threads that took no task, which may be without a core.
struct alignas(64) Run {
    std::atomic<uint64_t> ticket{kClosed};
};

struct Pool {
    alignas(64) std::atomic<uint32_t> job{0};  // the number of the last job published
    alignas(64) std::atomic<int64_t> done{0};
    alignas(64) std::atomic<uint32_t> sleepers{0};
    std::atomic<uint32_t> finished{0};
    std::atomic<uint32_t> caller_sleeps{0};
    std::atomic<bool> spins{false};
    std::atomic<int> num_spins{kSpins};
    std::atomic<int> wanted{1};
    // The current job; written while all runs are closed.
    alignas(64) std::atomic<void (*)(void*, int64_t)> task{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<int64_t> count{0};
    std::atomic<int> num_runs{1};
    Run runs[kMostThreads];
    pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;
    std::vector<pthread_t> started;  // not counting the caller's
    std::vector<int32_t> cores;      // thread i runs on cores[i % size]; empty: on any core

    int patience() const {
        return spins.load(std::memory_order_relaxed) ? num_spins.load(std::memory_order_relaxed) : 0;
    }

    // Runs the tasks left in thread `own`'s run, then in the others'. Returns false if none were left.
    bool work(int own) {
        bool worked = false;
        for (int i = 0, all = num_runs.load(std::memory_order_acquire); i < all; i++) {
            if (!work_on((own + i) % all)) continue;
            worked = true;
            if (done.load(std::memory_order_relaxed) == count.load(std::memory_order_relaxed)) break;
        }
        return worked;
    }

    bool work_on(int number) {
        std::atomic<uint64_t>& ticket = runs[number].ticket;
        uint64_t seen = ticket.load(std::memory_order_acquire);
        int64_t did = 0, total = 0;
        for (;;) {
            const uint64_t index = seen & kClosed;
            if (index == kClosed) break;
            auto* run = task.load(std::memory_order_acquire);
            void* argument = context.load(std::memory_order_acquire);
            const int64_t all = count.load(std::memory_order_acquire);
            const int64_t end = all * (number + 1) / num_runs.load(std::memory_order_acquire);
            if (static_cast<int64_t>(index) >= end) break;
            if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
            run(argument, static_cast<int64_t>(index));
            seen++;
            did++;
            total = all;
        }
        // A job ends only after all its participants report here, so `total` still belongs to the job of these tasks.
        if (did && done.fetch_add(did, std::memory_order_acq_rel) + did == total) {
            finished.fetch_add(1);
            if (caller_sleeps.load()) futex_wake(finished);
        }
        return did > 0;
    }

    void serve(int number) {
        uint32_t seen = job.load();
        auto begun = Clock::now();  // at the end of the last pause
        for (;;) {
            work(number);
            int left = patience();
            while (job.load(std::memory_order_relaxed) == seen && left-- > 0) _mm_pause();
            if (job.load() == seen) {
                pause(seen, begun);
                begun = Clock::now();
            }
            seen = job.load();
        }
    }

    // Yields, then sleeps, until there is another job than `seen`. begun: when the last pause ended.
    void pause(uint32_t seen, Clock::time_point begun) {
        const auto now = Clock::now();
        const auto most = std::min<Clock::duration>(kMostYielding, (now - begun) / kYieldingPart);
        while (spins.load(std::memory_order_relaxed) && job.load(std::memory_order_relaxed) == seen &&
               Clock::now() - now < most) {
            sched_yield();
        }
        if (job.load() != seen) return;
        sleepers.fetch_add(1);
        if (job.load() == seen) futex_wait(job, seen);
        sleepers.fetch_sub(1);
    }

    void run(void (*function)(void*, int64_t), void* argument, int64_t total) {
        pthread_mutex_lock(&busy);
        start();
        const uint64_t next = job.load(std::memory_order_relaxed) + 1u;
        const int all = static_cast<int>(started.size()) + 1;
        for (int i = 0; i < all; i++) runs[i].ticket.store(next << 32 | kClosed, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_release);
        task.store(function, std::memory_order_release);
        context.store(argument, std::memory_order_release);
        count.store(total, std::memory_order_release);
        num_runs.store(all, std::memory_order_release);
        done.store(0, std::memory_order_release);
        for (int i = 0; i < all; i++) {
            runs[i].ticket.store(next << 32 | static_cast<uint64_t>(total * i / all), std::memory_order_release);
        }
        job.store(static_cast<uint32_t>(next));
        if (sleepers.load()) futex_wake(job);
        work(0);
        for (int left = patience(); left > 0 && done.load() != total; left--) {
            _mm_pause();
        }
        while (done.load() != total) {
            caller_sleeps.store(1);
            uint32_t seen = finished.load();
            if (done.load() != total) futex_wait(finished, seen);
            caller_sleeps.store(0);
        }
        pthread_mutex_unlock(&busy);
    }

    struct Start {
        Pool* pool;
        int number;
    };

    void start() {
        while (static_cast<int>(started.size()) + 1 < wanted.load()) {
            auto* begin = new Start{this, static_cast<int>(started.size()) + 1};
            auto* body = +[](void* memory) -> void* {
                const Start own = *static_cast<Start*>(memory);
                delete static_cast<Start*>(memory);
                own.pool->serve(own.number);
                return nullptr;
            };
            pthread_t thread;
            if (pthread_create(&thread, nullptr, body, begin) != 0) {  // fewer threads give the same results
                delete begin;
                wanted = static_cast<int>(started.size()) + 1;
                break;
            }
            started.push_back(thread);
            bind(thread, core_of(started.size()));
        }
    }

    int core_of(size_t number) const { return cores.empty() ? -1 : cores[number % cores.size()]; }

    static int bind(pthread_t thread, int core) {
        if (core < 0) return 0;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(core, &set);
        return pthread_setaffinity_np(thread, sizeof set, &set);
    }

    int set_cores(const int32_t* first, int32_t number) {
        pthread_mutex_lock(&busy);
        cores.assign(first, first + number);
        int error = bind(pthread_self(), core_of(0));
        for (size_t i = 0; i < started.size() && !error; i++) error = bind(started[i], core_of(i + 1));
        pthread_mutex_unlock(&busy);
        return error;
    }
};

// Never destroyed: its threads outlive main.
Pool& pool() {
    static Pool* instance = new Pool;
    return *instance;
}

}  // namespace

void parallel(void (*task)(void*, int64_t), void* context, int64_t count) {
    if (count <= 0) return;
    if (count == 1 || pool().wanted.load(std::memory_order_relaxed) == 1) {
        for (int64_t i = 0; i < count; i++) task(context, i);
        return;
    }
    pool().run(task, context, count);
}

void set_threads(int count, bool spins) {
    pool().wanted = std::clamp(count, 1, kMostThreads);
    pool().spins = spins;
}

void set_patience(bool is_long) { pool().num_spins = is_long ? kLongSpins : kSpins; }

int threads() { return pool().wanted.load(std::memory_order_relaxed); }

int set_cores(const int32_t* cores, int32_t count) { return pool().set_cores(cores, count); }

void* scratch(Slot slot, int64_t bytes) {
    struct Memory {
        void* start = nullptr;
        int64_t size = 0;
        ~Memory() { free(start); }
    };
    static thread_local Memory memory[kNumSlots];
    Memory& own = memory[slot];
    if (own.size < bytes) {
        free(own.start);
        own.size = (bytes + 4095) / 4096 * 4096;
        own.start = aligned_alloc(64, own.size);
        if (own.start == nullptr) abort();
    }
    return own.start;
}

}  // namespace octavo
