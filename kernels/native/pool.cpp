#include "pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdlib>

namespace octavo {
namespace {

// How long a thread looks for work, or for the last task's end, before it sleeps: about 50 us. A step's calls follow
// each other within 10, and waking a thread takes 30 to 60. With more threads than cores nobody spins: the thread that
// is waited for may need the very core.
constexpr int kSpins = 1500;
constexpr uint64_t kClosed = 0xffffffff;  // a ticket's index while the next job is being written

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

struct Pool {
    // The job's number << 32 | its next task. A thread takes a task by adding 1 with compare-and-swap: that fails once
    // the job has changed, so a thread that comes late never runs one job's task with another's function. So nobody
    // waits for threads that took no task, which may be without a core.
    alignas(64) std::atomic<uint64_t> ticket{kClosed};
    alignas(64) std::atomic<int64_t> done{0};
    alignas(64) std::atomic<uint32_t> wake{0};
    std::atomic<uint32_t> sleepers{0};
    std::atomic<uint32_t> finished{0};
    std::atomic<uint32_t> caller_sleeps{0};
    std::atomic<void (*)(void*, int64_t)> task{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<int64_t> count{0};
    pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;
    std::atomic<int> wanted{1};
    int started = 1;  // the caller's thread counts
    std::atomic<bool> spins{false};

    // Runs a task if there is one. False: none is left, or none yet.
    bool work() {
        uint64_t seen = ticket.load(std::memory_order_acquire);
        for (;;) {
            uint64_t index = seen & kClosed;
            if (index == kClosed) return false;
            auto* run = task.load(std::memory_order_relaxed);
            void* argument = context.load(std::memory_order_relaxed);
            int64_t total = count.load(std::memory_order_relaxed);
            if (static_cast<int64_t>(index) >= total) return false;
            if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
            run(argument, static_cast<int64_t>(index));
            if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == total) {
                finished.fetch_add(1);
                if (caller_sleeps.load()) futex_wake(finished);
            }
            return true;
        }
    }

    void serve() {
        for (;;) {
            uint32_t seen = wake.load();
            uint64_t before = ticket.load();
            bool worked = false;
            while (work()) worked = true;
            if (worked) continue;
            bool changed = false;
            for (int i = spins.load(std::memory_order_relaxed) ? kSpins : 0; i > 0 && !changed; i--) {
                _mm_pause();
                changed = ticket.load(std::memory_order_relaxed) != before;
            }
            if (changed) continue;
            sleepers.fetch_add(1);
            if (ticket.load() == before) futex_wait(wake, seen);
            sleepers.fetch_sub(1);
        }
    }

    void run(void (*function)(void*, int64_t), void* argument, int64_t total) {
        pthread_mutex_lock(&busy);
        if (started < wanted.load()) start();
        uint64_t job = (ticket.load() >> 32) + 1;
        ticket.store(job << 32 | kClosed);
        task.store(function, std::memory_order_relaxed);
        context.store(argument, std::memory_order_relaxed);
        count.store(total, std::memory_order_relaxed);
        done.store(0, std::memory_order_relaxed);
        ticket.store(job << 32);
        if (sleepers.load()) {
            wake.fetch_add(1);
            futex_wake(wake);
        }
        while (work()) {}
        for (int i = spins.load(std::memory_order_relaxed) ? kSpins : 0; i > 0 && done.load() != total; i--) _mm_pause();
        while (done.load() != total) {
            caller_sleeps.store(1);
            uint32_t seen = finished.load();
            if (done.load() != total) futex_wait(finished, seen);
            caller_sleeps.store(0);
        }
        pthread_mutex_unlock(&busy);
    }

    void start() {
        for (; started < wanted.load(); started++) {
            pthread_t thread;
            auto* body = +[](void* self) -> void* {
                static_cast<Pool*>(self)->serve();
                return nullptr;
            };
            if (pthread_create(&thread, nullptr, body, this) != 0) break;  // fewer threads give the same results
            pthread_detach(thread);
        }
        cpu_set_t cores;
        spins = sched_getaffinity(0, sizeof cores, &cores) == 0 && started <= CPU_COUNT(&cores);
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
    if (count == 1 || pool().wanted.load() == 1) {
        for (int64_t i = 0; i < count; i++) task(context, i);
        return;
    }
    pool().run(task, context, count);
}

void set_threads(int count) { pool().wanted = count < 1 ? 1 : count; }

int threads() { return pool().wanted.load(); }

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
