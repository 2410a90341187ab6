// The inner loops of linears and attention: tiles of sums that stay in registers.
#pragma once

#include <cstdint>
#include <cstring>

#include "../native/vec.h"

namespace octavo {

// Most rows of a tile: with two vectors of columns, what the registers hold (16 of AVX2, 32 of AVX-512).
template <class V>
constexpr int kTileRows = V::W == 8 ? 6 : 12;

// Vectors of columns of a tile with so many rows: enough sums to hide the latency of an addition.
template <class V, int R>
constexpr int kTileVectors = R <= 1 ? 8 : R <= 3 ? 4 : V::W == 16 && R <= 6 ? 4 : 2;

// acc[r][v] += sum over k of a[r][k] * b[v][k], in order of k. b[v]: the first of a vector's columns, `stride` elements
// from one k (float32) or pair of k (bf16) to the next.
template <class V, int R, int N>
inline void accumulate(V (&acc)[R][N], const float* a, int64_t lda, const float* const (&b)[N], int64_t stride,
                       int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        V columns[N];
        for (int v = 0; v < N; v++) columns[v] = V::load(b[v] + k * stride);
        for (int r = 0; r < R; r++) {
            V x = V::all(a[r * lda + k]);
            for (int v = 0; v < N; v++) acc[r][v] = fma(x, columns[v], acc[r][v]);
        }
    }
}

template <class V, int R, int N>
inline void accumulate(V (&acc)[R][N], const float* a, int64_t lda, const bf16* const (&b)[N], int64_t stride,
                       int64_t count) {
    for (int64_t k = 0; k < count / 2; k++) {
        V columns[N];
        for (int v = 0; v < N; v++) columns[v] = V::first(b[v] + k * stride);
        for (int r = 0; r < R; r++) {
            V x = V::all(a[r * lda + 2 * k]);
            for (int v = 0; v < N; v++) acc[r][v] = fma(x, columns[v], acc[r][v]);
        }
        for (int v = 0; v < N; v++) columns[v] = V::second(b[v] + k * stride);
        for (int r = 0; r < R; r++) {
            V x = V::all(a[r * lda + 2 * k + 1]);
            for (int v = 0; v < N; v++) acc[r][v] = fma(x, columns[v], acc[r][v]);
        }
    }
    if (count % 2) {
        for (int v = 0; v < N; v++) {
            V column = V::first(b[v] + count / 2 * stride);
            for (int r = 0; r < R; r++) acc[r][v] = fma(V::all(a[r * lda + count - 1]), column, acc[r][v]);
        }
    }
}

#ifdef __AVX512BF16__
// Two products and a sum in one instruction: the inputs are bf16, the sums float32.
template <int R, int N>
inline void accumulate(V16 (&acc)[R][N], const bf16* a, int64_t lda, const bf16* const (&b)[N], int64_t stride,
                       int64_t count) {
    for (int64_t k = 0; k < (count + 1) / 2; k++) {
        __m512bh columns[N];
        for (int v = 0; v < N; v++) columns[v] = (__m512bh)_mm512_loadu_si512(b[v] + k * stride);
        for (int r = 0; r < R; r++) {
            int pair;
            std::memcpy(&pair, a + r * lda + 2 * k, 4);
            __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            for (int v = 0; v < N; v++) acc[r][v].x = _mm512_dpbf16_ps(acc[r][v].x, x, columns[v]);
        }
    }
}
#endif

}  // namespace octavo
