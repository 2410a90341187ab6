// y = x W^T + b of weights in 8 or 4 bits, by register tiles over packed weights: on integers within each block of
// inputs, in float32 from block to block. reference.py beside this file has the formulas.
//
// Dot products of integers are exact, and sums of floats run over the blocks in their order, in one accumulator: a
// row's result has the same bits whatever the other rows are, and however rows and columns are dealt out to tiles and
// threads.
//
// How weights are packed, and a dot product steps, is up to a path's Dots:
//     V                   its outputs come as vectors of these, two for a panel's columns
//     Value               what inputs are held as, int8_t or int16_t
//     kRows               most rows of a tile
//     kBlockBytes         of a panel, for each block of inputs
//     kPanelBytes         of a panel, after those of its blocks
//     pack(...)           packs one panel
//     sums<R>(...)        computes R rows times one panel
#pragma once

#include "outputs.h"
#include "quantized_rows.h"

namespace octavo {

// As kernels/linear/weights.py describes them, by weight rows.
struct QuantizedWeights {
    const int8_t* values;    // [rows, inputs]
    const void* scales;      // float [rows], or halves [rows, blocks]
    const uint16_t* minima;  // halves [rows, blocks], or null
};

template <class Dots>
int64_t quantized_panel_bytes(const Linear& linear) {
    return num_blocks(linear.inputs) * Dots::kBlockBytes + Dots::kPanelBytes;
}

template <class Dots>
int64_t quantized_bytes(const Linear& linear) {
    return num_panels<typename Dots::V>(linear) * quantized_panel_bytes<Dots>(linear);
}

// `panels` holds zeros.
template <class Dots>
void pack_quantized(const Linear& linear, const QuantizedWeights& weights, char* panels) {
    parallel(num_panels<typename Dots::V>(linear), [&](int64_t p) {
        Dots::pack(linear, weights, p, panels + p * quantized_panel_bytes<Dots>(linear));
    });
}

// What to bring into L2 meanwhile: with each block, so many bytes of the next panel.
struct AheadOfBlocks {
    const char* place;
    int64_t step;
    void operator()(int64_t block) const {
        for (int64_t i = 0; i < step; i += 64) _mm_prefetch(place + block * step + i, _MM_HINT_T1);
    }
};

// R rows from row r on, times panel p. This is tile `nth` of `tiles` that read the panel: each brings its share of the
// next one from memory.
template <class Dots, int R, class Output>
void quantized_tile(const Linear& linear, const Output& output, const QuantizedRows<typename Dots::Value>& inputs,
                    int64_t r, int64_t p, int64_t nth, int64_t tiles) {
    const int64_t bytes = quantized_panel_bytes<Dots>(linear);
    const char* panel = static_cast<const char*>(linear.panels) + p * bytes;
    typename Dots::V sums[R][2];
    Dots::template sums<R>(sums, inputs, r, panel,
                           AheadOfBlocks{panel + bytes + bytes * nth / tiles, Dots::kBlockBytes / tiles});
    for (int i = 0; i < R; i++) output.panel(sums[i], r + i, p);
}

template <class Dots, class Output, int R = Dots::kRows>
void quantized_tile_of(int rows, const Linear& linear, const Output& output,
                       const QuantizedRows<typename Dots::Value>& inputs, int64_t r, int64_t p, int64_t nth,
                       int64_t tiles) {
    if (rows == R) return quantized_tile<Dots, R>(linear, output, inputs, r, p, nth, tiles);
    if constexpr (R > 1) quantized_tile_of<Dots, Output, R - 1>(rows, linear, output, inputs, r, p, nth, tiles);
}

// Brings the sums of all panels for x[rows, inputs] to `output`.
template <class Dots, class Output>
void quantized_forward(const Linear& linear, const float* x, int64_t rows, const Output& output) {
    using Value = typename Dots::Value;
    const QuantizedRows<Value> inputs = quantize_rows<Value>(linear, x, rows);
    // Rows of a block of rows stay in half of a 512 KiB L2 while all panels pass by, a panel in L1 for all its tiles.
    const int64_t row_bytes = inputs.blocks * kBlock * sizeof(Value);
    const int64_t fitting = std::max<int64_t>(1, 196608 / row_bytes / Dots::kRows) * Dots::kRows;
    const int64_t row_blocks = (rows + fitting - 1) / fitting;
    const int64_t panels = num_panels<typename Dots::V>(linear);
    // Some tasks for each thread, so that one with a busy core does fewer.
    const int64_t groups = std::min(panels, std::max<int64_t>(1, (8 * threads() + row_blocks - 1) / row_blocks));
    parallel(row_blocks * groups, [&](int64_t task) {
        const int64_t i = task / groups, g = task % groups;
        const int64_t first = rows * i / row_blocks, count = rows * (i + 1) / row_blocks - first;
        const int64_t tiles = (count + Dots::kRows - 1) / Dots::kRows;
        for (int64_t p = panels * g / groups; p < panels * (g + 1) / groups; p++) {
            for (int64_t n = 0; n < tiles; n++) {
                const int64_t top = count * n / tiles, bottom = count * (n + 1) / tiles;
                quantized_tile_of<Dots>(bottom - top, linear, output, inputs, first + top, p, n, tiles);
            }
        }
    });
}

}  // namespace octavo
