// y = x W^T + b by AMX tiles: an instruction multiplies 16 rows x 32 inputs of bf16 by 32 inputs x 16 columns, and adds
// the products to 16 x 16 sums in float32.
//
// A sum's order is that of the instruction, step by step of 32 inputs, whatever the number of rows: a row's result has
// the same bits whatever the other rows are. Within a step, products of even and of odd inputs add up separately, in
// order; then both are added to the sum. Denormal numbers count as 0.
#pragma once

#include "../../native/cpp/amx.h"
#include "../outputs.h"
#include "tile_rows.h"

namespace octavo {

// A panel is [pair of inputs][column][2], like those of FloatLinear, with zeros up to a multiple of 32 inputs. 16 pairs
// of 16 columns are a tile, whose rows are a panel's width apart.
struct TileLinear {
    using V = V16;
    static constexpr int64_t kColumns = kPanel<V>, kStep = TileRows::kInputs * kColumns, kLine = kColumns * 4;

    static int64_t panel_size(const Linear& linear) { return TileRows::num_steps(linear.inputs) * kStep; }

    static int64_t bytes(const Linear& linear) { return num_panels<V>(linear) * panel_size(linear) * sizeof(bf16); }

    static void pack(const Linear& linear, const WeightRows& weights, char* panels) {
        pack_linear<V>(linear, weights.row<bf16>(0, linear.inputs), reinterpret_cast<bf16*>(panels),
                       panel_size(linear) / kColumns / 2);
    }

    // Passes the sums of all panels for x[rows, inputs] to `output`.
    template <class Output>
    static void forward(const Linear& linear, const float* x, int64_t rows, const Output& output) {
        const TileRows inputs = TileRows::of(linear, x, rows);
        // The rows of a block stay in half of a 2 MiB L2 over all panels.
        const int64_t fitting = std::max<int64_t>(1, (1 << 20) / (inputs.steps * 2 * TileRows::kSize * 2)) * kRows;
        const int64_t blocks = (rows + fitting - 1) / fitting, pairs = (rows + kRows - 1) / kRows;
        const int64_t panels = num_panels<V>(linear);
        // Several tasks per thread, so that a thread on a busy core does fewer.
        const int64_t groups = std::min(panels, std::max<int64_t>(1, (8 * threads() + blocks - 1) / blocks));
        parallel(blocks * groups, [&](int64_t task) {
            const TilesInUse tiles(kWholeTiles);
            const int64_t i = task / groups, g = task % groups;
            const int64_t first = pairs * i / blocks * kRows, last = std::min(rows, pairs * (i + 1) / blocks * kRows);
            for (int64_t p = panels * g / groups; p < panels * (g + 1) / groups; p++) {
                panel(linear, inputs, first, last, p, output);
            }
        });
    }

   private:
    static constexpr int64_t kRows = 2 * TileRows::kRows;  // of the 2 x 2 tiles that share factors

    // Prefetches into L2: with each step of a sum, some bytes of the next panel. Where rows are few enough to read a
    // panel only once, the CPU's own prefetchers do better: SmolLM2's linears take 7.3 ms instead of 7.8 for 16 rows.
    // For 256 rows they take 45 with these prefetches and 68 without.
    struct Ahead {
        const char* place;
        int64_t step;
        void operator()(int64_t k) const {
            for (int64_t i = 0; i < step; i += 64) _mm_prefetch(place + k * step + i, _MM_HINT_T1);
        }
    };

    // Computes rows [first, last) times panel p. They share the prefetching of the next panel.
    template <class Output>
    static void panel(const Linear& linear, const TileRows& inputs, int64_t first, int64_t last, int64_t p,
                      const Output& output) {
        const bf16* panel = static_cast<const bf16*>(linear.panels) + p * panel_size(linear);
        const int64_t size = panel_size(linear), count = (last - first + kRows - 1) / kRows;
        for (int64_t n = 0; n < count; n++) {
            const int64_t top = first + n * kRows, rows = std::min(kRows, last - top);
            const Ahead ahead = {reinterpret_cast<const char*>(panel + size + size * n / count),
                                 count == 1 ? 0 : kStep * 2 / count};
            alignas(64) float sums[kRows][kColumns];
            if (rows > TileRows::kRows) {
                multiply<true>(inputs.row_tile(top), panel, inputs.steps, ahead, sums);
            } else {
                multiply<false>(inputs.row_tile(top), panel, inputs.steps, ahead, sums);
            }
            for (int64_t r = 0; r < rows; r++) {
                output.panel({V::load(sums[r]), V::load(sums[r] + V::W)}, top + r, p);
            }
        }
    }

    // sums = a b, for 16 rows or, if kTwo, 32. Registers 0 to 3 hold sums, 4 and 5 rows, 6 and 7 columns.
    template <bool kTwo>
    static void multiply(const bf16* a, const bf16* b, int64_t steps, Ahead ahead, float (&sums)[kRows][kColumns]) {
        const bf16* lower = a + steps * TileRows::kSize;
        _tile_zero(0);
        _tile_zero(1);
        if (kTwo) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t k = 0; k < steps; k++) {
            ahead(k);
            _tile_loadd(4, a + k * TileRows::kSize, 64);
            _tile_loadd(6, b + k * kStep, kLine);
            _tile_loadd(7, b + k * kStep + kColumns, kLine);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (kTwo) {
                _tile_loadd(5, lower + k * TileRows::kSize, 64);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums[0], kLine);
        _tile_stored(1, sums[0] + V::W, kLine);
        if (kTwo) {
            _tile_stored(2, sums[TileRows::kRows], kLine);
            _tile_stored(3, sums[TileRows::kRows] + V::W, kLine);
        }
    }
};

}  // namespace octavo
