// Partial selection: the smallest of the largest values that together reach a goal.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../native/cpp/vec.h"

namespace octavo {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();  // fails every `at_least` test

// Loads the first `count` of 8 elements, with `rest` in place of the others.
inline V8 load_first(const float* p, int64_t count, float rest) {
    if (count >= 8) return V8::load(p);
    float values[8];
    for (int64_t i = 0; i < 8; i++) values[i] = i < count ? p[i] : rest;
    return V8::load(values);
}

inline V8 where_at_least(V8 v, V8 bound) { return {_mm256_cmp_ps(v.x, bound.x, _CMP_GE_OQ)}; }
inline int at_least(V8 v, V8 bound) { return _mm256_movemask_ps(where_at_least(v, bound).x); }

// Replaces elements below `bound` by 0.
inline V8 kept(V8 v, V8 bound) { return {_mm256_and_ps(v.x, where_at_least(v, bound).x)}; }

// For each mask of 8 bits, the numbers of the bits that are set, in order.
constexpr std::array<std::array<uint8_t, 8>, 256> chosen_by_mask() {
    std::array<std::array<uint8_t, 8>, 256> chosen{};
    for (int mask = 0; mask < 256; mask++) {
        for (int bit = 0, n = 0; bit < 8; bit++) {
            if (mask >> bit & 1) chosen[mask][n++] = static_cast<uint8_t>(bit);
        }
    }
    return chosen;
}

// Writes the elements in `mask` to `place`, in order, and pads them to 8 with garbage. Returns their number.
inline int64_t store_chosen(__m256i v, int mask, void* place) {
    static constexpr auto kChosen = chosen_by_mask();
    __m128i order = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kChosen[mask].data()));
    __m256i packed = _mm256_permutevar8x32_epi32(v, _mm256_cvtepu8_epi32(order));
    _mm256_storeu_si256(static_cast<__m256i*>(place), packed);
    return __builtin_popcount(mask);
}

// A float64 sum in four parts, added up in a fixed order.
struct Sum {
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
    void add(V8 v) {
        low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(v.x)));
        high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(v.x, 1)));
    }
    double total() const {
        double parts[4];
        _mm256_storeu_pd(parts, _mm256_add_pd(low, high));
        return parts[0] + parts[1] + (parts[2] + parts[3]);
    }
};

// Measures of the values of at least `bound`: their number, and their sum.
struct Count {
    static double of(const float* values, int64_t count, float bound) {
        int64_t found = 0;
        for (int64_t i = 0; i < count; i += 8) {
            found += __builtin_popcount(at_least(load_first(values + i, count - i, kNaN), V8::all(bound)));
        }
        return static_cast<double>(found);
    }
};

struct Weight {
    static double of(const float* values, int64_t count, float bound) {
        Sum sum;
        for (int64_t i = 0; i < count; i += 8) sum.add(kept(load_first(values + i, count - i, kNaN), V8::all(bound)));
        return sum.total();
    }
};

// Keeps the values of at least `bound`, or only the others, and drops the rest. Returns the number left.
inline int64_t leave(float* values, int64_t count, float bound, bool at_least_it) {
    int64_t left = 0;
    for (int64_t i = 0; i < count; i += 8) {
        V8 v = load_first(values + i, count - i, kNaN);
        int there = count - i >= 8 ? 0xff : (1 << (count - i)) - 1;
        int mask = at_least(v, V8::all(bound)) ^ (at_least_it ? 0 : 0xff);
        left += store_chosen(_mm256_castps_si256(v.x), mask & there, values + left);
    }
    return left;
}

// Returns the largest t such that the measure of values of at least t reaches `goal`, which is above 0; 0 if even all
// values do not. Values are not negative. They are overwritten, and so are the 8 floats after them.
//
// Each round halves the range of bits from the least to the largest candidate, and drops values outside.
template <class Measure>
float select(float* values, int64_t count, double goal) {
    double above = 0;
    while (count > 0) {
        V8 most = V8::all(values[0]), least = most;
        for (int64_t i = 0; i < count; i += 8) {
            V8 v = load_first(values + i, count - i, values[0]);
            most = max(most, v);
            least = min(least, v);
        }
        const float high = largest(most), low = smallest(least);
        uint32_t low_bits, high_bits;
        std::memcpy(&low_bits, &low, 4);
        std::memcpy(&high_bits, &high, 4);
        const uint32_t middle = high_bits - (high_bits - low_bits) / 2;
        float bound;
        std::memcpy(&bound, &middle, 4);
        const double measured = Measure::of(values, count, bound);
        const bool reached = above + measured >= goal;
        if (low == high) return reached ? low : 0.0f;
        if (!reached) above += measured;
        count = leave(values, count, bound, reached);
    }
    return 0.0f;
}

}  // namespace octavo
