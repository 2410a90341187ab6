// Outputs of a linear layer: what is done with its sums.
//
// An Output has `void panel(const V (&acc)[2], int64_t r, int64_t p) const`: tiles call it once for each of their
// rows r and panels p, in any order and from any thread, with the sums of the panel's columns, before the bias. Before
// they compute those sums they may call `void prefetch(int64_t r, int64_t p) const`.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "panels.h"

namespace octavo {

// Ways in which octavo_linear passes on its outputs; the same numbers as in kernels/linear/native.py.
//
// kStoreForNext and kAddFromLast go together: one layer stores its outputs in the form that the next one multiplies.
// Where their kind has no such form, or not for so few rows, they do what kStore and kAdd do.
enum Epilogue : int32_t { kStore, kAdd, kStoreForNext, kAddFromLast };

// Returns columns i to i + 7 of panel p's sums, with the bias.
template <class V>
V8 biased(const Linear& linear, const float* sums, int64_t i, int64_t p) {
    V8 value = V8::load(sums + i);
    return linear.bias ? value + V8::load(linear.bias + p * kPanel<V> + i) : value;
}

inline V8 gated(Activation activation, V8 gate, V8 up) {
    return activation == kGeluTanh ? gelu_tanh(gate) * up : clamped_swiglu(gate, up);
}

// Not inlined: only few models have these, and the tile's loop over its rows stays short for the others.
template <class V>
__attribute__((noinline)) V gated_otherwise(Activation activation, V gate, V up) {
    float gates[V::W], ups[V::W];
    gate.store(gates);
    up.store(ups);
    for (int i = 0; i < V::W; i += 8) gated(activation, V8::load(gates + i), V8::load(ups + i)).store(gates + i);
    return V::load(gates);
}

__attribute__((noinline)) inline void soft_cap(float* values, int64_t count, float cap) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) soft_capped(V8::load(values + i), cap).store(values + i);
    float rest[8] = {};
    std::copy(values + i, values + count, rest);
    soft_capped(V8::load(rest), cap).store(rest);
    std::copy(rest, rest + count - i, values + i);
}

// Adds the bias to half `half` of panel p's sums.
template <class V>
V with_bias(const Linear& linear, V sums, int half, int64_t p) {
    return linear.bias ? sums + V::load(linear.bias + p * kPanel<V> + half * V::W) : sums;
}

// Stores the sums in y[rows, outputs], or adds them to it.
template <class V>
struct StoreOutput {
    const Linear& linear;
    float* y;
    bool adds;

    // Into L1: rows are far apart, so that the outputs of a panel miss the caches when there are many rows.
    void prefetch(int64_t r, int64_t p) const {
        const int64_t width = linear.gated ? V::W : kPanel<V>;
        const float* place = y + r * linear.outputs + p * width;
        for (int64_t i = 0; i < width; i += 16) _mm_prefetch(reinterpret_cast<const char*>(place + i), _MM_HINT_T0);
    }

    void panel(const V (&acc)[2], int64_t r, int64_t p) const {
        const V first = with_bias(linear, acc[0], 0, p), second = with_bias(linear, acc[1], 1, p);
        if (linear.gated) {
            const bool is_silu = linear.activation == kSilu;
            put(is_silu ? silu(first) * second : gated_otherwise<V>(linear.activation, first, second), r, p * V::W);
        } else {
            put(first, r, p * kPanel<V>);
            put(second, r, p * kPanel<V> + V::W);
        }
    }

    // Stores or adds columns c to c + V::W - 1 of row r.
    void put(V value, int64_t r, int64_t c) const {
        const int64_t rest = linear.outputs - c;
        float* place = y + r * linear.outputs + c;
        if (rest >= V::W) {
            (adds ? V::load(place) + value : value).store(place);
            return;
        }
        float values[V::W];
        value.store(values);
        for (int64_t i = 0; i < rest; i++) place[i] = adds ? place[i] + values[i] : values[i];
    }
};

// The largest output of each row that its mask leaves, and its column: the lowest among equals. NaN is larger than all;
// the first NaN wins. NaN or infinity outside the mask is NaN, too: the row's outputs are not finite.
//
// A row's best so far is one number that only grows, so it ends up the same however columns are divided among threads.
template <class V>
struct ArgmaxOutput {
    const Linear& linear;  // not gated
    uint64_t* best;        // by row; starts as kNothing
    // Null: no row has a mask. By row, null or the columns it may choose, column c as bit c % 8 of byte c / 8, filled up
    // to a multiple of 32.
    const uint8_t* const* masks;

    static constexpr uint64_t kNothing = 0;

    // Ordered by value, then by falling column.
    static uint64_t key(float value, int64_t column) {
        const float zero_is_zero = value + 0.0f;
        uint32_t bits;
        std::memcpy(&bits, &zero_is_zero, 4);
        uint32_t ordered = value != value ? ~0u : bits & kSign ? ~bits : bits | kSign;
        return uint64_t{ordered} << 32 | ~static_cast<uint32_t>(column);
    }

    static float value(uint64_t key) {
        uint32_t ordered = key >> 32, bits = ordered & kSign ? ordered ^ kSign : ~ordered;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }

    void prefetch(int64_t, int64_t) const {}

    static int64_t column(uint64_t key) { return ~static_cast<uint32_t>(key); }

    // Not inlined: a tile's loop over its rows would be too long to unroll, and its sums would leave the registers
    // (twice the time for 8 rows).
    __attribute__((noinline)) void panel(const V (&acc)[2], int64_t r, int64_t p) const {
        float sums[kPanel<V>];
        acc[0].store(sums);
        acc[1].store(sums + V::W);
        uint64_t seen = __atomic_load_n(best + r, __ATOMIC_RELAXED);
        const V8 largest = V8::all(value(seen));
        const int64_t first = p * kPanel<V>, count = std::min<int64_t>(kPanel<V>, linear.outputs - first);
        if (linear.soft_cap > 0) return capped_panel(sums, r, p, masks ? masks[r] : nullptr, count, seen);
        if (masks && masks[r]) return masked_panel(sums, r, p, masks[r] + first / 8, count, seen);
        bool may_grow = false;
        for (int i = 0; i < kPanel<V>; i += 8) {
            V8 output = biased<V>(linear, sums, i, p);
            output.store(sums + i);
            may_grow |= any_not_less(output, largest);
        }
        if (!may_grow) return;
        uint64_t own = kNothing;
        for (int64_t i = 0; i < count; i++) own = std::max(own, key(sums[i], first + i));
        grow(r, seen, own);
    }

   private:
    static constexpr uint32_t kSign = 0x80000000;

    // mask: of all columns, or null. Columns whose outputs differ may be equal under the cap: the lowest wins.
    __attribute__((noinline)) void capped_panel(float* sums, int64_t r, int64_t p, const uint8_t* mask, int64_t count,
                                                uint64_t seen) const {
        for (int i = 0; i < kPanel<V>; i += 8) biased<V>(linear, sums, i, p).store(sums + i);
        soft_cap(sums, kPanel<V>, linear.soft_cap);
        uint64_t own = kNothing;
        for (int64_t i = 0; i < count; i++) {
            const int64_t column = p * kPanel<V> + i;
            if (!mask || mask[column / 8] >> column % 8 & 1) {
                own = std::max(own, key(sums[i], column));
            } else if (sums[i] != sums[i]) {
                own = std::max(own, key(std::numeric_limits<float>::quiet_NaN(), column));
            }
        }
        grow(r, seen, own);
    }

    // mask: of the panel's columns, of which `count` exist.
    void masked_panel(float* sums, int64_t r, int64_t p, const uint8_t* mask, int64_t count, uint64_t seen) const {
        static_assert(kPanel<V> <= 32, "a panel's mask is within one word");
        constexpr float kInfinity = std::numeric_limits<float>::infinity();
        const V8 largest = V8::all(value(seen));
        bool may_grow = false;
        for (int i = 0; i < kPanel<V>; i += 8) {
            V8 output = biased<V>(linear, sums, i, p);
            output.store(sums + i);
            may_grow |= (not_less(output, largest) & mask[i / 8]) | not_less(output, V8::all(kInfinity));
        }
        if (!may_grow) return;
        uint64_t own = kNothing;
        for (int64_t i = 0; i < count; i++) {
            if (mask[i / 8] >> i % 8 & 1) {
                own = std::max(own, key(sums[i], p * kPanel<V> + i));
            } else if (!(sums[i] < kInfinity)) {
                own = std::max(own, key(std::numeric_limits<float>::quiet_NaN(), p * kPanel<V> + i));
            }
        }
        grow(r, seen, own);
    }

    void grow(int64_t r, uint64_t seen, uint64_t own) const {
        while (own > seen && !__atomic_compare_exchange_n(best + r, &seen, own, true, __ATOMIC_RELAXED,
                                                          __ATOMIC_RELAXED)) {
        }
    }
};

}  // namespace octavo
