// y = x W^T + b by register tiles over packed weights: in integers within each block of inputs, in float32 across
// blocks. For 8-bit and 4-bit weights, whose formulas are in kernels/linear/reference.py, and for bf16 weights in fixed
// point (dots_fixed.h).
//
// Dot products of integers are exact, and sums of floats run over the blocks in order, in one accumulator: a row's
// result has the same bits whatever the other rows are, and however rows and columns are divided among tiles and
// threads.
//
// A path's Dots defines how weights are packed and how dot products are computed:
//     V                   the vector type of outputs, two of them for a panel's columns
//     Inputs              rows of inputs: those of quantized_rows.h or fixed_rows.h; threads share them in kTogether
//     kRows               the most rows of a tile
//     kBlockBytes         bytes of a panel for each block of inputs
//     kPanelBytes         bytes of a panel after its blocks
//     pack(...)           packs one panel
//     Task                what a thread holds while it computes a share of the rows
//     panel(...)          passes the sums of one panel for some rows to an output
#pragma once

#include "../outputs.h"
#include "quantized_rows.h"

namespace octavo {

// Prefetches into L2: with each block, `step` bytes of the next panel.
struct AheadOfBlocks {
    const char* place;
    int64_t step;
    void operator()(int64_t block) const {
        for (int64_t i = 0; i < step; i += 64) _mm_prefetch(place + block * step + i, _MM_HINT_T1);
    }
};

// The Task of Dots that compute in vector registers.
struct NothingHeld {
    explicit NothingHeld(int64_t) {}
    ~NothingHeld() {}  // not trivial, so that one without use is no warning
};

// The `panel` of Dots that provide
//     sums<R>(...)        computes R rows times one panel
//     kUnaided            so few rows wait for memory alone, which the CPU's own prefetchers read faster
template <class Dots>
struct TileByTile {
    using Task = NothingHeld;

    // Computes rows [first, last) times panel p, in tiles of nearly equal height within each group; each prefetches its
    // share of the next panel.
    template <class Inputs, class Output>
    static void panel(const Inputs& inputs, int64_t first, int64_t last, const char* panel, const char* next, int64_t p,
                      const Output& output) {
        constexpr int64_t kTogether = Inputs::kTogether;
        const int64_t tiles = (last - first + Dots::kRows - 1) / Dots::kRows;
        const int64_t step = last - first <= Dots::kUnaided ? 0 : Dots::kBlockBytes / tiles;
        int64_t n = 0;
        for (int64_t group = first; group < last; group += kTogether) {
            const int64_t rows = std::min(kTogether, last - group), parts = (rows + Dots::kRows - 1) / Dots::kRows;
            for (int64_t i = 0; i < parts; i++, n++) {
                const int64_t top = group + rows * i / parts, bottom = group + rows * (i + 1) / parts;
                for (int64_t r = top; tiles > 1 && r < bottom; r++) output.prefetch(r, p);
                tile<Dots::kRows>(bottom - top, inputs, top, panel, p,
                                  AheadOfBlocks{next + (next - panel) * n / tiles, step}, output);
            }
        }
    }

   private:
    // Computes `rows` rows, at most R, from row r on.
    template <int R, class Inputs, class Output>
    static void tile(int64_t rows, const Inputs& inputs, int64_t r, const char* panel, int64_t p, AheadOfBlocks ahead,
                     const Output& output) {
        if (rows < R) {
            if constexpr (R > 1) tile<R - 1>(rows, inputs, r, panel, p, ahead, output);
            return;
        }
        typename Dots::V sums[R][2];
        Dots::template sums<R>(sums, inputs, r, panel, ahead);
        for (int i = 0; i < R; i++) output.panel(sums[i], r + i, p);
    }
};

// Linears whose inner loop is Dots.
template <class Dots>
struct DotsLinear {
    using V = typename Dots::V;
    using Inputs = typename Dots::Inputs;

    static int64_t bytes(const Linear& linear) { return num_panels<V>(linear) * panel_bytes(linear); }

    // Packs into `panels`, which hold zeros.
    static bool pack(const Linear& linear, const WeightRows& weights, char* panels) {
        parallel(num_panels<V>(linear),
                 [&](int64_t p) { Dots::pack(linear, weights, p, panels + p * panel_bytes(linear)); });
        return true;
    }

    // Passes the sums of all panels for x[rows, inputs] to `output`.
    template <class Output>
    static void forward(const Linear& linear, const float* x, int64_t rows, const Output& output) {
        const Inputs inputs = Inputs::of(linear, x, rows);
        // A block of rows stays in half of a 512 KiB L2 over all panels; a panel stays in L1 for all its tiles.
        constexpr int64_t kTogether = Inputs::kTogether;
        const int64_t row_bytes = inputs.blocks * Inputs::kBlock * sizeof(typename Inputs::Value);
        const int64_t fitting = std::max<int64_t>(1, 196608 / row_bytes / kTogether);
        const int64_t row_groups = (rows + kTogether - 1) / kTogether;
        const int64_t row_blocks = (row_groups + fitting - 1) / fitting, panels = num_panels<V>(linear);
        // Several tasks per thread, so that a thread on a busy core does fewer.
        const int64_t groups = std::min(panels, std::max<int64_t>(1, (8 * threads() + row_blocks - 1) / row_blocks));
        parallel(row_blocks * groups, [&](int64_t task) {
            const int64_t i = task / groups, g = task % groups;
            const int64_t first = row_groups * i / row_blocks * kTogether;
            const int64_t last = std::min(rows, row_groups * (i + 1) / row_blocks * kTogether);
            const typename Dots::Task held(last - first);
            for (int64_t p = panels * g / groups; p < panels * (g + 1) / groups; p++) {
                const char* panel = static_cast<const char*>(linear.panels) + p * panel_bytes(linear);
                Dots::panel(inputs, first, last, panel, panel + panel_bytes(linear), p, output);
            }
        });
    }

   private:
    static int64_t panel_bytes(const Linear& linear) {
        return (linear.inputs + Inputs::kBlock - 1) / Inputs::kBlock * Dots::kBlockBytes + Dots::kPanelBytes;
    }
};

}  // namespace octavo
