// y = x W^T + b by register tiles over packed weights, for the vector type V of a path.
//
// Each sum runs over the inputs in order, in one accumulator: a row's result has the same bits whatever the other rows
// are, and however rows and columns are divided among tiles and threads.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../native/cpp/pool.h"
#include "../elementwise/rms_norm/rms_norm.h"
#include "../native/cpp/accumulate.h"
#include "../native/cpp/unroll.h"
#include "outputs.h"
#include "panels.h"

namespace octavo {

// Computes R rows from row r on, times panel p and those that a tile of so few rows computes with it, all before panel
// `end`. panel: panel p. prefetches: the tile shares its panel with others, and their outputs may miss the caches.
template <class V, int R, class A, class T, class Output, class Fetch>
void tile(const Linear& linear, const Output& output, const A* a, int64_t lda, int64_t r, const T* panel, int64_t p,
          int64_t end, bool prefetches, Fetch ahead) {
    constexpr int N = kTileVectors<V, R>;
    constexpr int64_t kStride = panel_size<V, T>(1);
    V acc[R][N];
    const T* b[N];
    for (int v = 0; v < N; v++) {
        // Past the end, the last panel is computed again and discarded.
        b[v] = panel + std::min<int64_t>(v / 2, end - p - 1) * panel_size<V, T>(panel_steps<T>(linear.inputs)) +
               v % 2 * kStride / 2;
        for (int i = 0; i < R; i++) acc[i][v] = V::zero();
    }
    for (int i = 0; prefetches && i < R; i++) output.prefetch(r + i, p);
    accumulate(acc, a + r * lda, lda, b, kStride, linear.inputs, ahead);
    for (int v = 0; v < N && p + v / 2 < end; v += 2) {
        for (int i = 0; i < R; i++) output.panel({acc[i][v], acc[i][v + 1]}, r + i, p + v / 2);
    }
}

// Calls f(row, rows, nth, tiles) for tiles of nearly equal height of rows [first, last).
template <class V, class F>
OCTAVO_INLINED inline void each_tile(int64_t first, int64_t last, F&& f) {
    const int64_t rows = last - first, tiles = (rows + kTileRows<V> - 1) / kTileRows<V>;
    for (int64_t i = 0; i < tiles; i++) {
        const int64_t top = first + rows * i / tiles, bottom = first + rows * (i + 1) / tiles;
        f(top, bottom - top, i, tiles);
    }
}

// Computes rows [first, last) times panels [begin, end), one or a few at a time, which stay in L1 for all tiles. Each
// tile prefetches its share of the next panel while it computes, so that memory is read at an even pace. A tile that has
// a panel for itself prefetches a little ahead of its own place.
template <class V, class A, class T, class Output>
void block(const Linear& linear, const Output& output, const A* a, int64_t lda, int64_t first, int64_t last,
           int64_t begin, int64_t end) {
    const int64_t rows = last - first, size = panel_size<V, T>(panel_steps<T>(linear.inputs));
    const int64_t panels_at_once = (rows == 1 ? kTileVectors<V, 1> : rows == 2 ? kTileVectors<V, 2> : 2) / 2;
    for (int64_t p = begin; p < end; p += panels_at_once) {
        const T* panel = static_cast<const T*>(linear.panels) + p * size;
        const int64_t stop = std::min(p + panels_at_once, end);
        each_tile<V>(first, last, [&](int64_t r, int64_t count, int64_t nth, int64_t tiles) {
            as_constant<kTileRows<V>>(count, [&](auto R) {
                constexpr int kPanels = kTileVectors<V, R> / 2;
                const int64_t bytes = size * sizeof(T);
                const char* ahead = reinterpret_cast<const char*>(panel) + (stop - p) * bytes + bytes * nth / tiles;
                if (kPanels == 1 && tiles == 1) ahead = reinterpret_cast<const char*>(panel) + kPrefetchedAhead;
                const int64_t step = panel_size<V, T>(1) * sizeof(T) / tiles;
                tile<V, R, A, T>(linear, output, a, lda, r, panel, p, stop, tiles > 1, Ahead<kPanels>{ahead, bytes, step});
            });
        });
    }
}

// Returns the inputs that the tiles read: x itself, or a normed or rounded copy.
template <class A>
const A* linear_inputs(const Linear& linear, const float* x, int64_t rows, int64_t& lda) {
    const int64_t inputs = linear.inputs;
    lda = row_size<A>(inputs);
    if constexpr (sizeof(A) == 4) {
        if (!linear.norm) return x;
    }
    A* copy = static_cast<A*>(scratch(kSlotRows, rows * lda * sizeof(A)));
    const int64_t rows_per_task = std::max<int64_t>(1, 8192 / inputs);
    parallel((rows + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
        for (int64_t r = task * rows_per_task; r < std::min(rows, (task + 1) * rows_per_task); r++) {
            input_row(x + r * inputs, linear.norm, linear.eps, inputs, copy + r * lda);
            if constexpr (std::is_same_v<A, bf16>) std::fill(copy + r * lda + inputs, copy + (r + 1) * lda, bf16{0});
        }
    });
    return copy;
}

// Divides rows and panels among threads: calls f(first row, end, first panel, end). row_bytes: of the inputs of a row.
template <class V, class F>
void each_block(const Linear& linear, int64_t row_bytes, int64_t rows, F&& f) {
    // The rows of a block stay in half of a 512 KiB L2 over all panels.
    const int64_t fitting = std::max<int64_t>(1, 196608 / row_bytes / kTileRows<V>) * kTileRows<V>;
    const int64_t blocks = (rows + fitting - 1) / fitting;
    const int64_t panels = num_panels<V>(linear);
    // Several tasks per thread, so that a thread on a busy core does fewer.
    const int64_t groups = std::min(panels, std::max<int64_t>(1, (8 * threads() + blocks - 1) / blocks));
    parallel(blocks * groups, [&](int64_t task) {
        int64_t i = task / groups, g = task % groups;
        f(rows * i / blocks, rows * (i + 1) / blocks, panels * g / groups, panels * (g + 1) / groups);
    });
}

// Passes the sums of all panels to `output`, for rows of inputs in the form that tiles read: see linear_inputs.
template <class V, class A, class T, class Output>
void multiply_rows(const Linear& linear, const A* a, int64_t lda, int64_t rows, const Output& output) {
    each_block<V>(linear, lda * sizeof(A), rows, [&](int64_t first, int64_t last, int64_t begin, int64_t end) {
        block<V, A, T>(linear, output, a, lda, first, last, begin, end);
    });
}

// Passes the sums of all panels for x[rows, inputs] to `output`.
template <class V, class A, class T, class Output>
void linear_forward(const Linear& linear, const float* x, int64_t rows, const Output& output) {
    int64_t lda;
    const A* a = linear_inputs<A>(linear, x, rows, lda);
    multiply_rows<V, A, T>(linear, a, lda, rows, output);
}

// Linears of floats: inputs are read as A, weights are stored as T.
template <class Vector, class A, class T>
struct FloatLinear {
    using V = Vector;

    static int64_t bytes(const Linear& linear) { return panels_bytes<V, T>(linear); }

    static bool pack(const Linear& linear, const WeightRows& weights, char* panels) {
        pack_linear<V>(linear, weights.row<T>(0, linear.inputs), reinterpret_cast<T*>(panels),
                       panel_steps<T>(linear.inputs));
        return true;
    }

    template <class Output>
    static void forward(const Linear& linear, const float* x, int64_t rows, const Output& output) {
        linear_forward<V, A, T>(linear, x, rows, output);
    }
};

// Stands for a kind of weights that a path does not have.
template <class Vector>
struct NoLinear {
    using V = Vector;

    static int64_t bytes(const Linear&) { return 0; }

    static bool pack(const Linear&, const WeightRows&, char*) { return false; }

    template <class Output>
    static void forward(const Linear&, const float*, int64_t, const Output&) {}
};

}  // namespace octavo
