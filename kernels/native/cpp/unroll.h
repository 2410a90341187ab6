// Compile-time unrolled loops.
#pragma once

#include <utility>

// For functions that must be inlined into their callers.
#define OCTAVO_INLINED __attribute__((always_inline))

namespace octavo {

template <class F, int... I>
OCTAVO_INLINED inline void unroll(F& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}

// Calls f(0), f(1), ... f(N - 1), each number a constant; f is [&](auto i) OCTAVO_INLINED {...}. An array that only
// such numbers index lives in registers. The compiler unrolls loops too late for that: g++ 12 leaves sums in memory, at
// half the speed.
template <int N, class F>
OCTAVO_INLINED inline void unroll(F&& f) {
    unroll(f, std::make_integer_sequence<int, N>{});
}

}  // namespace octavo
