// The inner loops of linears and attention: tiles of sums that stay in registers.
#pragma once

#include <cstdint>

#include "unroll.h"
#include "vec.h"

namespace octavo {

// The most rows of a tile: with two vectors of columns, as many as the registers hold (16 of AVX2, 32 of AVX-512).
template <class V>
constexpr int kTileRows = V::W == 8 ? 6 : 12;

// Vectors of columns of a tile with R rows: with AVX2 enough sums to hide the latency of an addition, 8, and few enough
// that none is spilled. With AVX-512 a tile of few rows waits for memory, which comes fastest as a single stream.
template <class V, int R>
constexpr int kTileVectors = V::W == 16 ? 2 : R == 1 ? 8 : R == 2 ? 4 : 2;

// How far ahead in its own panel a tile prefetches that reads it alone. With 8 to 32 KiB a Zen 5 gains nothing more.
constexpr int64_t kPrefetchedAhead = 4096;

// Prefetches into L2: a line of each of kPanels panels, `step` bytes further with each step of a sum. A panel that is
// read alone is prefetched whole, also where a step reads two lines. Several panels, read for one or two rows, leave no
// time for more than one line each, and the CPU's own prefetchers follow.
template <int kPanels>
struct Ahead {
    const char* place;
    int64_t apart, step;
    void operator()(int64_t k) const {
        for (int i = 0; i < kPanels; i++) _mm_prefetch(place + i * apart + k * step, _MM_HINT_T1);
        // SmolLM2's layers with 12 rows: 7.1 ms instead of 10.6 on a core of a Zen 5; with 1 row this would cost 8%.
        if (kPanels == 1 && step > 64) _mm_prefetch(place + k * step + 64, _MM_HINT_T1);
    }
};

struct NothingAhead {
    void operator()(int64_t) const {}
};

// Products of floats.
struct FusedMultiplyAdd {
    // Repeats the number at a in all lanes.
    template <class V>
    static V all(const float* a) {
        return V::all(*a);
    }
    // sum += b times the number at a, which the instruction repeats.
    template <class V>
    OCTAVO_INLINED static void add_repeated(V& sum, const float* a, V b) {
        add_product(sum, a, b);
    }
    template <class V>
    V operator()(V a, V b, V c) const {
        return fma(a, b, c);
    }
};

// Copies sums to or from an array that constants alone index: the compiler keeps no other in registers beside the inline
// assembly of vec16.h.
template <class V, int R, int N>
OCTAVO_INLINED inline void copy(const V (&from)[R][N], V (&to)[R][N]) {
    unroll<R>([&](auto r) OCTAVO_INLINED { unroll<N>([&](auto v) OCTAVO_INLINED { to[r][v] = from[r][v]; }); });
}

// acc[r][v] += the number at row(r) * columns[v].
template <class V, int R, int N, class Row, class Op = FusedMultiplyAdd>
OCTAVO_INLINED inline void add_rows(V (&acc)[R][N], Row&& row, const V (&columns)[N], Op op = {}) {
    unroll<R>([&](auto r) OCTAVO_INLINED {
        // Every other row of many: if all were repeated, there would be as many loads as products. Three rows take
        // longer so.
        if constexpr (kRepeats<V> && R > 3 && r % 2 == 0) {
            unroll<N>([&](auto v) OCTAVO_INLINED { Op::add_repeated(acc[r][v], row(r), columns[v]); });
        } else {
            const V x = Op::template all<V>(row(r));
            unroll<N>([&](auto v) OCTAVO_INLINED { acc[r][v] = op(x, columns[v], acc[r][v]); });
        }
    });
}

// acc[r][v] += the number at row(r) * column(v). Rows or columns, whichever are fewer, stay in registers beside the sums.
template <class V, int R, int N, class Row, class Column, class Op = FusedMultiplyAdd>
OCTAVO_INLINED inline void multiply_add(V (&acc)[R][N], Row&& row, Column&& column, Op op = {}) {
    if constexpr (R <= N) {
        V rows[R];
        unroll<R>([&](auto r) OCTAVO_INLINED { rows[r] = Op::template all<V>(row(r)); });
        unroll<N>([&](auto v) OCTAVO_INLINED {
            const V x = column(v);
            unroll<R>([&](auto r) OCTAVO_INLINED { acc[r][v] = op(rows[r], x, acc[r][v]); });
        });
    } else {
        V columns[N];
        unroll<N>([&](auto v) OCTAVO_INLINED { columns[v] = column(v); });
        add_rows(acc, row, columns, op);
    }
}

// acc[r][v] += sum over k of a[r][k] * b[v][k], in order of k. b[v]: points to a vector of columns; the next k
// (float32) or pair of k (bf16) is `stride` elements further.
template <class V, int R, int N, class Fetch = NothingAhead>
inline void accumulate(V (&acc)[R][N], const float* a, int64_t lda, const float* const (&b)[N], int64_t stride,
                       int64_t count, Fetch ahead = {}) {
    V sums[R][N];
    copy(acc, sums);
    for (int64_t k = 0; k < count; k++) {
        ahead(k);
        multiply_add(sums, [&](int r) OCTAVO_INLINED { return a + r * lda + k; },
                     [&](int v) OCTAVO_INLINED { return V::load(b[v] + k * stride); });
    }
    copy(sums, acc);
}

template <class V, int R, int N, class Fetch = NothingAhead>
inline void accumulate(V (&acc)[R][N], const float* a, int64_t lda, const bf16* const (&b)[N], int64_t stride,
                       int64_t count, Fetch ahead = {}) {
    V sums[R][N];
    copy(acc, sums);
    for (int64_t k = 0; k < count / 2; k++) {
        ahead(k);
        multiply_add(sums, [&](int r) OCTAVO_INLINED { return a + r * lda + 2 * k; },
                     [&](int v) OCTAVO_INLINED { return V::first(b[v] + k * stride); });
        multiply_add(sums, [&](int r) OCTAVO_INLINED { return a + r * lda + 2 * k + 1; },
                     [&](int v) OCTAVO_INLINED { return V::second(b[v] + k * stride); });
    }
    if (count % 2) {
        multiply_add(sums, [&](int r) OCTAVO_INLINED { return a + r * lda + count - 1; },
                     [&](int v) OCTAVO_INLINED { return V::first(b[v] + count / 2 * stride); });
    }
    copy(sums, acc);
}

}  // namespace octavo
