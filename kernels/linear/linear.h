// y = x W^T + b by register tiles over packed weights, for the vector V that a path has.
//
// Each sum runs over the inputs in their order, in one accumulator: a row's result has the same bits whatever the other
// rows are, and however rows and columns are dealt out to tiles and threads.
#pragma once

#include <algorithm>
#include <cmath>

#include "../native/pool.h"
#include "../native/vec.h"
#include "../rms_norm/rms_norm.h"
#include "accumulate.h"

namespace octavo {

// What becomes of a sum.
enum Epilogue : int32_t { kStore, kAdd };

// As kernels/linear/native.py lays it out.
struct Linear {
    const void* panels;  // see pack_linear
    const float* bias;   // in the order of the panels' columns, or null
    const float* norm;   // weights of an RMS norm of the input, or null
    float eps;
    int32_t inputs;
    int32_t outputs;  // of the result: half as many as there are weight rows if gated
    int32_t gated;    // the result is silu(first half of the outputs) * second half
    int32_t bf16_weights;
};

template <class V>
constexpr int kPanel = 2 * V::W;  // columns of a panel

template <class V>
int64_t num_panels(const Linear& linear) {
    const int64_t width = linear.gated ? V::W : kPanel<V>;
    return (linear.outputs + width - 1) / width;
}

// The weight row behind column c of panel p, or -1 for padding. A gated panel holds V::W gates, then their V::W ups.
template <class V>
int64_t weight_row(const Linear& linear, int64_t p, int64_t c) {
    if (!linear.gated) {
        int64_t row = p * kPanel<V> + c;
        return row < linear.outputs ? row : -1;
    }
    int64_t row = p * V::W + c % V::W;
    return row >= linear.outputs ? -1 : c < V::W ? row : row + linear.outputs;
}

// From rows [weight rows, inputs] to panels: float32 as [panel][input][column], bf16 as [panel][pair of inputs]
// [column][2], with zeros where there is no column or no second input.
template <class V, class T>
void pack_linear(const Linear& linear, const T* rows, T* panels) {
    constexpr int kPair = sizeof(T) == 2 ? 2 : 1;
    const int64_t steps = (linear.inputs + kPair - 1) / kPair;
    parallel(num_panels<V>(linear), [&](int64_t p) {
        T* panel = panels + p * steps * kPanel<V> * kPair;
        for (int64_t c = 0; c < kPanel<V>; c++) {
            int64_t row = weight_row<V>(linear, p, c);
            for (int64_t i = 0; i < steps * kPair; i++) {
                T value = row >= 0 && i < linear.inputs ? rows[row * linear.inputs + i] : T{0};
                panel[i / kPair * kPanel<V> * kPair + c * kPair + i % kPair] = value;
            }
        }
    });
}

template <class V>
struct Output {
    const Linear& linear;
    float* y;
    int64_t ldy;
    Epilogue epilogue;

    // Columns c to c + 7 of row r.
    void put(V8 value, int64_t r, int64_t c) const {
        int64_t rest = linear.outputs - c;
        float* place = y + r * ldy + c;
        if (rest >= 8) {
            (epilogue == kAdd ? V8::load(place) + value : value).store(place);
            return;
        }
        float values[8];
        value.store(values);
        for (int64_t i = 0; i < rest; i++) place[i] = epilogue == kAdd ? place[i] + values[i] : values[i];
    }

    // The two vectors of one panel in row r.
    void panel(const V (&acc)[2], int64_t r, int64_t p) const {
        float sums[2 * V::W];
        acc[0].store(sums);
        acc[1].store(sums + V::W);
        for (int i = 0; i < (linear.gated ? V::W : 2 * V::W); i += 8) {
            V8 value = biased(sums, i, p);
            if (!linear.gated) {
                put(value, r, p * kPanel<V> + i);
            } else {
                put(silu(value) * biased(sums, V::W + i, p), r, p * V::W + i);
            }
        }
    }

    V8 biased(const float* sums, int64_t i, int64_t p) const {
        V8 value = V8::load(sums + i);
        return linear.bias ? value + V8::load(linear.bias + p * kPanel<V> + i) : value;
    }
};

// R rows from row r on, times panels [begin, end). This is tile `nth` of `tiles` that read the same panels: each brings
// its share of the next panel from memory while it computes, so that memory is read at an even pace.
template <class V, int R, class A, class T>
void tile(const Output<V>& output, const A* a, int64_t lda, int64_t r, int64_t begin, int64_t end, int64_t nth,
          int64_t tiles) {
    constexpr int N = kTileVectors<R>;
    constexpr int kPair = sizeof(T) == 2 ? 2 : 1;
    constexpr int64_t kStride = kPanel<V> * kPair;
    const int64_t count = output.linear.inputs;
    const int64_t panel_size = (count + kPair - 1) / kPair * kStride;
    const T* panels = static_cast<const T*>(output.linear.panels);
    for (int64_t p = begin; p < end; p += N / 2) {
        V acc[R][N];
        const T* b[N];
        for (int v = 0; v < N; v++) {
            // Past the end the last panel is computed again, and dropped.
            b[v] = panels + std::min(p + v / 2, end - 1) * panel_size + v % 2 * V::W * kPair;
            for (int i = 0; i < R; i++) acc[i][v] = V::zero();
        }
        const int64_t bytes = panel_size * sizeof(T), step = kStride * sizeof(T);
        const char* next = reinterpret_cast<const char*>(panels + (p + end - begin) * panel_size);
        accumulate(acc, a + r * lda, lda, b, kStride, count,
                   Ahead<N / 2>{next + bytes * nth / tiles, bytes, step / tiles});
        for (int v = 0; v < N && p + v / 2 < end; v += 2) {
            for (int i = 0; i < R; i++) output.panel({acc[i][v], acc[i][v + 1]}, r + i, p + v / 2);
        }
    }
}

// Rows [first, last) in tiles of nearly equal heights, for each panel or few: those stay in L1 for all tiles.
template <class V, class A, class T, int R = kTileRows<V>>
void tiles_of(int rows, const Output<V>& output, const A* a, int64_t lda, int64_t r, int64_t begin, int64_t end,
              int64_t nth, int64_t tiles) {
    if (rows == R) return tile<V, R, A, T>(output, a, lda, r, begin, end, nth, tiles);
    if constexpr (R > 1) tiles_of<V, A, T, R - 1>(rows, output, a, lda, r, begin, end, nth, tiles);
}

template <class V, class A, class T>
void block(const Output<V>& output, const A* a, int64_t lda, int64_t first, int64_t last, int64_t begin, int64_t end) {
    const int64_t rows = last - first;
    const int64_t tiles = (rows + kTileRows<V> - 1) / kTileRows<V>;
    const int64_t panels_at_once = rows == 1 ? 4 : rows == 2 ? 2 : 1;
    for (int64_t p = begin; p < end; p += panels_at_once) {
        for (int64_t i = 0; i < tiles; i++) {
            int64_t top = first + rows * i / tiles, bottom = first + rows * (i + 1) / tiles;
            tiles_of<V, A, T>(bottom - top, output, a, lda, top, p, std::min(p + panels_at_once, end), i, tiles);
        }
    }
}

// Inputs that the tiles read: x itself, or a normed or rounded copy.
template <class A>
const A* linear_inputs(const Linear& linear, const float* x, int64_t rows, int64_t& lda) {
    const int64_t inputs = linear.inputs;
    lda = inputs;
    if constexpr (sizeof(A) == 4) {
        if (!linear.norm) return x;
    } else {
        lda = (inputs + 1) / 2 * 2;
    }
    A* copy = static_cast<A*>(scratch(kSlotRows, rows * lda * sizeof(A)));
    const int64_t rows_per_task = std::max<int64_t>(1, 8192 / inputs);
    parallel((rows + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
        for (int64_t r = task * rows_per_task; r < std::min(rows, (task + 1) * rows_per_task); r++) {
            input_row(x + r * inputs, linear.norm, linear.eps, inputs, copy + r * lda);
            for (int64_t i = inputs; i < lda; i++) copy[r * lda + i] = 0;
        }
    });
    return copy;
}

// y[rows, outputs] = or += the layer's outputs for x[rows, inputs].
template <class V, class A, class T>
void linear_forward(const Linear& linear, const float* x, int64_t rows, float* y, Epilogue epilogue) {
    int64_t lda;
    const A* a = linear_inputs<A>(linear, x, rows, lda);
    const Output<V> output{linear, y, linear.outputs, epilogue};
    // Rows of a block stay in half of a 512 KiB L2 while all panels pass by.
    const int64_t fitting = std::max<int64_t>(1, 196608 / (lda * sizeof(A)) / kTileRows<V>) * kTileRows<V>;
    const int64_t blocks = (rows + fitting - 1) / fitting;
    const int64_t panels = num_panels<V>(linear);
    // Some tasks for each thread, so that one with a busy core does fewer.
    const int64_t groups = std::min(panels, std::max<int64_t>(1, (8 * threads() + blocks - 1) / blocks));
    parallel(blocks * groups, [&](int64_t task) {
        int64_t i = task / groups, g = task % groups;
        block<V, A, T>(output, a, lda, rows * i / blocks, rows * (i + 1) / blocks, panels * g / groups,
                       panels * (g + 1) / groups);
    });
}

}  // namespace octavo
