// A pool of threads that share the tasks of one call at a time with the calling thread.
#pragma once

#include <cstdint>

namespace octavo {

// Runs task(context, i) for every i in [0, count), on the caller's thread and the pool's. Returns when all are done. A
// call during another call waits for it. Must not be called from within a task.
//
// Each thread has a run of tasks: thread t of T begins with task count * t / T and goes on in order, and takes tasks
// from other runs once its own is done. So neighbouring tasks, and the memory they read, mostly stay with one thread
// over calls of the same count.
void parallel(void (*task)(void* context, int64_t i), void* context, int64_t count);

template <class F>
void parallel(int64_t count, F&& f) {
    if (count == 1) return f(int64_t{0});
    parallel([](void* context, int64_t i) { (*static_cast<F*>(context))(i); }, &f, count);
}

// Sets the number of threads that compute, including the caller's: 1 to kMostThreads. The pool grows at the next call,
// and never shrinks, but with 1 the caller computes alone. spins: a thread without work spins for about 50 us, then yields
// its core for up to 1 ms before it sleeps. Must be false with fewer cores than threads: the thread that it waits for may
// need its core.
constexpr int kMostThreads = 1024;
void set_threads(int count, bool spins);

// is_long: threads spin for about 300 us from now on, else for the 50 us of the beginning.
void set_patience(bool is_long);
int threads();

// Binds the calling thread to the first of `count` cores, and the pool's threads to the following ones; further threads
// start again at the first core. Returns 0, or the error number.
int set_cores(const int32_t* cores, int32_t count);

// Returns at least `bytes` of memory, 64-byte aligned, valid until the calling thread asks for this slot again. There
// are few slots: a function that uses one must not call another function that uses the same.
enum Slot { kSlotRows, kSlotTile, kSlotPartials, kSlotDraw, kNumSlots };
void* scratch(Slot slot, int64_t bytes);

}  // namespace octavo
