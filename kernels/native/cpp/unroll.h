// Compile-time unrolled loops.
#pragma once

#include <utility>

// Of functions that must not be called, but be part of what calls them.
#define OCTAVO_INLINED __attribute__((always_inline))

namespace octavo {

template <class F, int... I>
OCTAVO_INLINED inline void unroll(F& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}

// f(0), f(1), ... f(N - 1), each with its number as a constant; f is [&](auto i) OCTAVO_INLINED {...}. An array that only
// such numbers index lives in registers. The compiler unrolls loops too late for that: g++ 12 leaves sums in memory, at half the
// speed.
template <int N, class F>
OCTAVO_INLINED inline void unroll(F&& f) {
    unroll(f, std::make_integer_sequence<int, N>{});
}

}  // namespace octavo
