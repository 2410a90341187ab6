// RMS norm of one row at a time.
#pragma once

#include <algorithm>
#include <cmath>

#include "../../native/cpp/pool.h"
#include "../../native/cpp/vec.h"

namespace octavo {

// The sum of x^2, always in the same order.
inline float sum_of_squares(const float* x, int64_t size) {
    V8 a = V8::zero(), b = V8::zero();
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
        V8 first = V8::load(x + i), second = V8::load(x + i + 8);
        a = fma(first, first, a);
        b = fma(second, second, b);
    }
    float total = sum(a + b);
    for (; i < size; i++) total = std::fma(x[i], x[i], total);
    return total;
}

// 1 / sqrt(mean(x^2) + eps)
inline float inverse_rms(const float* x, int64_t size, float eps) {
    return 1.0f / std::sqrt(sum_of_squares(x, size) / static_cast<float>(size) + eps);
}

inline void put(float value, float& place) { place = value; }
inline void put(float value, bf16& place) { place = to_bf16(value); }

// A linear's input row y: x normed with `weight`, or x itself if that is null; rounded if T is bf16.
template <class T>
void input_row(const float* x, const float* weight, float eps, int64_t size, T* y) {
    const float scale = weight ? inverse_rms(x, size, eps) : 1.0f;
    for (int64_t i = 0; i < size; i++) put(weight ? x[i] * scale * weight[i] : x[i], y[i]);
}

// y[rows, size] += the norm of x[rows, size].
inline void add_rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t size, float* y) {
    const int64_t at_once = 16;
    parallel((rows + at_once - 1) / at_once, [&](int64_t task) {
        for (int64_t r = task * at_once; r < std::min(rows, (task + 1) * at_once); r++) {
            const float* from = x + r * size;
            float* to = y + r * size;
            const float scale = inverse_rms(from, size, eps);
            for (int64_t i = 0; i < size; i++) to[i] += from[i] * scale * weight[i];
        }
    });
}

}  // namespace octavo
