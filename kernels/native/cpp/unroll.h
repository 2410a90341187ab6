// Compile-time unrolled loops, and numbers as constants.
#pragma once

#include <cstdint>
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

// Calls f(a constant) for a number from 1 to kMost.
template <int kMost, class F>
OCTAVO_INLINED inline void as_constant(int64_t number, F&& f) {
    if (number == kMost) return f(std::integral_constant<int, kMost>{});
    if constexpr (kMost > 1) as_constant<kMost - 1>(number, f);
}

}  // namespace octavo
