// Threads that share the tasks of one call at a time with the thread that makes it.
#pragma once

#include <cstdint>

namespace octavo {

// task(context, i) for every i in [0, count), in any order, on the caller's thread and the pool's. Returns when all
// are done. A call that comes while another one runs waits for it. Not to be called from within a task.
void parallel(void (*task)(void* context, int64_t i), void* context, int64_t count);

template <class F>
void parallel(int64_t count, F&& f) {
    if (count == 1) return f(int64_t{0});
    parallel([](void* context, int64_t i) { (*static_cast<F*>(context))(i); }, &f, count);
}

// Threads that compute, the caller's included, at least 1. The pool grows when the next call needs it, and does not
// shrink, but with 1 the caller computes alone.
void set_threads(int count);
int threads();

// Memory of at least `bytes`, 64-byte aligned, that belongs to the calling thread and this slot until it asks again.
// Slots are few: a function that holds one must not call another that asks for the same.
enum Slot { kSlotRows, kSlotTile, kNumSlots };
void* scratch(Slot slot, int64_t bytes);

}  // namespace octavo
