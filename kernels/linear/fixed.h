// bf16 weights where vectors multiply 16-bit integers faster than floats and know no bf16 (AVX2: 16 products and 8 sums
// of two in as many instructions as 8 products with their sums take in float32): block fixed point.
//
// 64 inputs of a row share a scale, and so do the 64 weights that belong to them. Their products add up exactly in int32,
// and the groups of a row in float32, in their order. Inputs have 12 bits and a sign, four more than bf16. Weights have
// 13 and a sign, and a power of 2 as scale: those above a 32nd of the largest of their 64 keep all the bits of bf16.
// Shared exponents: "block floating point", J. H. Wilkinson, Rounding Errors in Algebraic Processes, 1963.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../rms_norm/rms_norm.h"
#include "accumulate.h"
#include "panels.h"

namespace octavo {

struct Fixed {
    int16_t value;
};

constexpr int64_t kFixedGroup = 64;
constexpr int kInputLimit = 4095, kWeightBits = 13;
static_assert(kFixedGroup * kInputLimit * ((1 << kWeightBits) - 1) <= INT32_MAX);

inline int64_t fixed_groups(int64_t inputs) { return (inputs + kFixedGroup - 1) / kFixedGroup; }

// A row of inputs is [group][scale, 64 values]: elements of a group.
constexpr int64_t kFixedInputs = kFixedGroup + 2;

template <>
inline int64_t row_size<Fixed>(int64_t inputs) {
    return fixed_groups(inputs) * kFixedInputs;
}

// A panel is [group][scales of the columns, 32 pairs of their weights]: steps of a panel.
constexpr int64_t kFixedSteps = kFixedGroup / 2 + 1;

template <>
inline int64_t panel_steps<Fixed>(int64_t inputs) {
    return fixed_groups(inputs) * kFixedSteps;
}

// 8 values rounded to nearest.
inline void store_fixed(V8 values, Fixed* y) {
    __m256i whole = _mm256_cvtps_epi32(values.x);
    __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y), halves);
}

// An infinite or undefined input makes its group's scale, and so every sum of the row, infinite or undefined.
template <>
inline void input_row(const float* x, const float* weight, float eps, int64_t size, Fixed* y) {
    const float norm = weight ? inverse_rms(x, size, eps) : 1.0f;
    for (int64_t first = 0; first < size; first += kFixedGroup, y += kFixedInputs) {
        alignas(32) float values[kFixedGroup] = {};
        const int64_t count = std::min(kFixedGroup, size - first);
        for (int64_t i = 0; i < count; i++) values[i] = weight ? x[first + i] * norm * weight[first + i] : x[first + i];
        V8 most = V8::zero(), nothing = V8::zero();
        for (int64_t i = 0; i < kFixedGroup; i += 8) {
            const V8 value = V8::load(values + i);
            most = max(most, max(value, V8::zero() - value));
            nothing = fma(value, V8::zero(), nothing);
        }
        const float scale = largest(most) / kInputLimit + sum(nothing);
        std::memcpy(y, &scale, sizeof scale);
        const V8 divisor = V8::all(scale == 0.0f ? 1.0f : scale);
        for (int64_t i = 0; i < kFixedGroup; i += 8) store_fixed(V8::load(values + i) / divisor, y + 2 + i);
    }
}

// From bf16 rows [weight rows, inputs].
template <class V>
void pack_linear(const Linear& linear, const bf16* rows, Fixed* panels) {
    constexpr int64_t kStride = 2 * kPanel<V>;
    const int64_t inputs = linear.inputs, panel_size = panel_steps<Fixed>(inputs) * kStride;
    parallel(num_panels<V>(linear), [&](int64_t p) {
        for (int64_t g = 0; g < fixed_groups(inputs); g++) {
            Fixed* group = panels + p * panel_size + g * kFixedSteps * kStride;
            for (int64_t c = 0; c < kPanel<V>; c++) {
                const int64_t row = weight_row<V>(linear, p, c);
                float values[kFixedGroup] = {}, most = 0.0f;
                for (int64_t i = 0; row >= 0 && i < std::min(kFixedGroup, inputs - g * kFixedGroup); i++) {
                    values[i] = to_float(rows[row * inputs + g * kFixedGroup + i]);
                    // A weight that is no number makes a sum none, as it should.
                    most = std::fabs(values[i]) <= most ? most : std::fabs(values[i]);
                }
                int exponent = 0;
                std::frexp(most, &exponent);
                const float scale = std::isfinite(most) ? std::ldexp(1.0f, std::max(exponent - kWeightBits, -126)) : NAN;
                std::memcpy(group + 2 * c, &scale, sizeof scale);
                for (int64_t i = 0; i < kFixedGroup; i++) {
                    const float whole = std::isfinite(scale) ? std::nearbyint(values[i] / scale) : 0.0f;
                    group[(i / 2 + 1) * kStride + 2 * c + i % 2].value = static_cast<int16_t>(whole);
                }
            }
        }
    });
}

// acc += x.first * column.first + x.second * column.second, in each of 8 pairs. Written out, for compilers copy every sum
// to another register and back.
inline void add_products(__m256i& acc, __m256i x, __m256i column) {
    __m256i products;
    asm("vpmaddwd %2, %1, %0" : "=x"(products) : "x"(x), "x"(column));
    asm("vpaddd %1, %0, %0" : "+x"(acc) : "x"(products));
}

inline __m256i load_pairs(const Fixed* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

inline __m256i all_pairs(const Fixed* p) {
    __m256i pair;
    asm("vpbroadcastd %1, %0" : "=x"(pair) : "m"(*reinterpret_cast<const int32_t*>(p)));
    return pair;
}

// `count` inputs, as the float versions in accumulate.h.
template <int R, int N, class Fetch = NothingAhead>
inline void accumulate(V8 (&acc)[R][N], const Fixed* a, int64_t lda, const Fixed* const (&b)[N], int64_t stride,
                       int64_t count, Fetch ahead = {}) {
    for (int64_t g = 0; g < fixed_groups(count); g++) {
        const Fixed* inputs = a + g * kFixedInputs;
        const int64_t scales = g * kFixedSteps * stride;
        __m256i sums[R][N];
        for (int r = 0; r < R; r++) {
            for (int v = 0; v < N; v++) sums[r][v] = _mm256_setzero_si256();
        }
        for (int64_t k = 0; k < kFixedGroup / 2; k++) {
            const int64_t pair = scales + (k + 1) * stride;
            ahead(g * kFixedSteps + k + 1);
            if constexpr (R <= N) {
                __m256i rows[R];
                for (int r = 0; r < R; r++) rows[r] = all_pairs(inputs + r * lda + 2 + 2 * k);
                for (int v = 0; v < N; v++) {
                    const __m256i column = load_pairs(b[v] + pair);
                    for (int r = 0; r < R; r++) add_products(sums[r][v], rows[r], column);
                }
            } else {
                __m256i columns[N];
                for (int v = 0; v < N; v++) columns[v] = load_pairs(b[v] + pair);
                for (int r = 0; r < R; r++) {
                    const __m256i x = all_pairs(inputs + r * lda + 2 + 2 * k);
                    for (int v = 0; v < N; v++) add_products(sums[r][v], x, columns[v]);
                }
            }
        }
        ahead(g * kFixedSteps);
        for (int r = 0; r < R; r++) {
            const V8 scale = V8::all(*reinterpret_cast<const float*>(inputs + r * lda));
            for (int v = 0; v < N; v++) {
                const V8 both = scale * V8::load(reinterpret_cast<const float*>(b[v] + scales));
                acc[r][v] = fma({_mm256_cvtepi32_ps(sums[r][v])}, both, acc[r][v]);
            }
        }
    }
}

}  // namespace octavo
