// Threads that share the tasks of one call at a time with the thread that makes it.
#pragma once

#include <cstdint>

namespace octavo {

// task(context, i) for every i in [0, count), on the caller's thread and the pool's. Returns when all are done. A call
// that comes while another one runs waits for it. Not to be called from within a task.
//
// Tasks are dealt out in runs: thread t of T begins with task count * t / T and goes on in order, and takes from the
// others' runs once its own is done. So neighbouring tasks, and the memory they read, mostly stay with one thread, from
// one call of the same count to the next.
void parallel(void (*task)(void* context, int64_t i), void* context, int64_t count);

template <class F>
void parallel(int64_t count, F&& f) {
    if (count == 1) return f(int64_t{0});
    parallel([](void* context, int64_t i) { (*static_cast<F*>(context))(i); }, &f, count);
}

// Threads that compute, the caller's included: 1 to kMostThreads. The pool grows when the next call needs it, and does
// not shrink, but with 1 the caller computes alone. spins: whether a thread without work looks for some, for about 50 us,
// before it sleeps. With fewer cores than threads it must not: the thread it waits for may need the very core.
constexpr int kMostThreads = 1024;
void set_threads(int count, bool spins);
int threads();

// Binds the calling thread to the first of `count` cores, and the pool's to the following ones; those of which there are
// more than cores begin again. Returns 0, or the error number.
int set_cores(const int32_t* cores, int32_t count);

// Memory of at least `bytes`, 64-byte aligned, that belongs to the calling thread and this slot until it asks again.
// Slots are few: a function that holds one must not call another that asks for the same.
enum Slot { kSlotRows, kSlotTile, kSlotPartials, kSlotDraw, kNumSlots };
void* scratch(Slot slot, int64_t bytes);

}  // namespace octavo
