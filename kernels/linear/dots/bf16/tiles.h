// y = x W^T + b by AMX tiles: an instruction multiplies 16 rows x 32 inputs of bf16 by 32 inputs x 16 columns, and adds
// the products to 16 x 16 sums in float32.
//
// A sum's order is that of the instruction, step by step of 32 inputs, whatever the number of rows: a row's result has
// the same bits whatever the other rows are. Within a step, products of even and of odd inputs add up separately, in
// order; then both are added to the sum. Denormal numbers count as 0.
#pragma once

#include "../../../native/cpp/amx.h"
#include "../../outputs.h"
#include "dots_bf16.h"
#include "tile_rows.h"

namespace octavo {

// Rounds the outputs of a gated layer to the tiles that the next one multiplies.
struct TilesOutput {
    TileRows next;

    void prefetch(int64_t r, int64_t p) const {
        _mm_prefetch(reinterpret_cast<const char*>(next.place(r, p * V16::W)), _MM_HINT_T0);
    }

    // Stores columns c to c + 15 of row r.
    void put(V16 value, int64_t r, int64_t c) const { store_as_bf16(value, next.place(r, c)); }
};

// A panel is [pair of inputs][column][2], like those of FloatLinear, with zeros up to a multiple of 32 inputs. 16 pairs
// of 16 columns are a tile, whose rows are a panel's width apart.
struct TileLinear {
    using V = V16;
    static constexpr int64_t kColumns = kPanel<V>, kStep = TileRows::kInputs * kColumns, kLine = kColumns * 4;

    static int64_t panel_size(const Linear& linear) { return TileRows::num_steps(linear.inputs) * kStep; }

    static int64_t bytes(const Linear& linear) { return num_panels<V>(linear) * panel_size(linear) * sizeof(bf16); }

    static bool pack(const Linear& linear, const WeightRows& weights, char* panels) {
        pack_linear<V>(linear, weights.row<bf16>(0, linear.inputs), reinterpret_cast<bf16*>(panels),
                       panel_size(linear) / kColumns / 2);
        return true;
    }

    // Passes the sums of all panels for x[rows, inputs] to `output`.
    template <class Output>
    static void forward(const Linear& linear, const float* x, int64_t rows, const Output& output) {
        multiply_all(linear, TileRows::of(linear, x, rows), rows, output);
    }

    // True if so many rows can pass from a gated layer to the next as tiles, in memory for their floats. width: outputs
    // of the first.
    static bool can_pass(int64_t rows, int64_t width) { return rows > kRows && width % TileRows::kInputs == 0; }

    static void store_for_next(const Linear& linear, const float* x, int64_t rows, float* y) {
        multiply_all(linear, TileRows::of(linear, x, rows), rows, TilesOutput{passed(y, linear.outputs)});
    }

    // x: from store_for_next.
    static void add_from_last(const Linear& linear, float* x, int64_t rows, float* y) {
        multiply_all(linear, passed(x, linear.inputs), rows, StoreOutput<V>{linear, y, true});
    }

   private:
    static constexpr int64_t kRows = 2 * TileRows::kRows;  // of the 2 x 2 tiles that share factors
    // Steps of a part of a panel, at most: 32 KiB of an L1 of 48.
    static constexpr int64_t kPart = 16;

    using Sums = float[kRows][kColumns];

    static TileRows passed(float* memory, int64_t width) {
        return {TileRows::num_steps(width), reinterpret_cast<bf16*>(memory)};
    }

    template <class Output>
    static void multiply_all(const Linear& linear, const TileRows& inputs, int64_t rows, const Output& output) {
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
            const int64_t begin = panels * g / groups, end = panels * (g + 1) / groups;
            if (last - first > kRows) {
                many_rows(linear, inputs, first, last, begin, end, output);
            } else {
                few_rows(linear, inputs, first, last, begin, end, output);
            }
        });
    }

    static const bf16* panel(const Linear& linear, int64_t p) {
        return static_cast<const bf16*>(linear.panels) + p * panel_size(linear);
    }

    // Passes a row's sums to the output.
    template <class Output>
    static void pass(const Linear& linear, const Output& output, const float (&sums)[kColumns], int64_t r, int64_t p) {
        const V acc[2] = {V::load(sums), V::load(sums + V::W)};
        if constexpr (std::is_same_v<Output, ArgmaxOutput<V>>) {
            output.panel(acc, r, p);
        } else if (linear.gated) {
            output.put(gated_for_bf16(linear, acc, p), r, p * V::W);
        } else if constexpr (!std::is_same_v<Output, TilesOutput>) {
            output.panel(acc, r, p);
        }
    }

    // Computes rows [first, last), 32 at most, times panels [begin, end). Each is read once, and the CPU's own
    // prefetchers do well: with others SmolLM2's linears take 7.8 ms for 16 rows instead of 7.3.
    template <class Output>
    static void few_rows(const Linear& linear, const TileRows& inputs, int64_t first, int64_t last, int64_t begin,
                         int64_t end, const Output& output) {
        alignas(64) Sums sums;
        for (int64_t p = begin; p < end; p++) {
            multiply<false>(last - first > TileRows::kRows, inputs.row_tile(first), inputs.steps, panel(linear, p),
                            inputs.steps, nullptr, sums, [](int64_t) {});
            for (int64_t r = first; r < last; r++) pass(linear, output, sums[r - first], r, p);
        }
    }

    // Rows whose sums are complete, but have not all gone to the output.
    //
    // A load must wait until a tile's store is complete, and outputs of many rows miss the caches. So these rows are
    // passed on while the next ones are multiplied, a few with each step.
    template <class Output>
    class Late {
    public:
        Late(const Linear& linear, const Output& output) : linear_(linear), output_(output) {}

        // Where the next sums belong.
        Sums& free() { return sums_[free_]; }

        // Takes what has been written to `free`: the sums of `rows` rows of panel p, from row top on.
        void add(int64_t top, int64_t rows, int64_t p) {
            pass_some(kRows);
            free_ ^= 1, next_ = 0, end_ = rows, top_ = top, p_ = p;
        }

        void pass_some(int64_t count) {
            for (const int64_t stop = std::min(end_, next_ + count); next_ < stop; next_++) {
                pass(linear_, output_, sums_[free_ ^ 1][next_], top_ + next_, p_);
            }
        }

    private:
        const Linear& linear_;
        const Output& output_;
        int64_t next_ = 0, end_ = 0, top_ = 0, p_ = 0;
        int free_ = 0;
        alignas(64) Sums sums_[2];
    };

    // Computes rows [first, last) times panels [begin, end), a part of a panel after the other, each for all rows: it
    // stays in L1.
    template <class Output>
    static void many_rows(const Linear& linear, const TileRows& inputs, int64_t first, int64_t last, int64_t begin,
                          int64_t end, const Output& output) {
        const int64_t steps = inputs.steps, count = (last - first + kRows - 1) / kRows;
        const int64_t parts = (steps + kPart - 1) / kPart;
        // With each step some late rows are passed on, and memory for as many outputs is prefetched, as is some of the
        // next panel.
        const int64_t rows_a_step = (kRows + steps / parts - 1) / (steps / parts);
        const int64_t bytes_a_step = kStep * sizeof(bf16) / count;
        Sums* unfinished = parts == 1 ? nullptr : static_cast<Sums*>(scratch(kSlotTile, count * sizeof(Sums)));
        Late<Output> late(linear, output);
        for (int64_t p = begin; p < end; p++) {
            const bf16* weights = panel(linear, p);
            const char* ahead = reinterpret_cast<const char*>(weights + panel_size(linear));
            for (int64_t part = 0; part < parts; part++) {
                const int64_t from = steps * part / parts, to = steps * (part + 1) / parts;
                const bool is_last = part + 1 == parts;
                for (int64_t n = 0; n < count; n++, ahead += (to - from) * bytes_a_step) {
                    const int64_t top = first + n * kRows, rows = std::min(kRows, last - top);
                    auto between = [&](int64_t k) {
                        for (int64_t i = 0; i < bytes_a_step; i += 64) {
                            _mm_prefetch(ahead + k * bytes_a_step + i, _MM_HINT_T1);
                        }
                        late.pass_some(rows_a_step);
                        if (!is_last) return;
                        const int64_t stop = std::min(rows, (k + 1) * rows_a_step);
                        for (int64_t r = k * rows_a_step; r < stop; r++) output.prefetch(top + r, p);
                    };
                    multiply<true>(rows > TileRows::kRows, inputs.row_tile(top) + from * TileRows::kSize, steps,
                                   weights + from * kStep, to - from, part ? unfinished[n] : nullptr,
                                   is_last ? late.free() : unfinished[n], between);
                    if (is_last) late.add(top, rows, p);
                }
            }
        }
        late.pass_some(kRows);
    }

    // Load the tile at a, of the upper or the lower 16 rows; GCC needs a register's number as a literal. kOnce: it is
    // read once, and would push a panel out of L1.
    template <bool kOnce>
    static void load_upper(const bf16* a) {
        if constexpr (kOnce) {
            _tile_stream_loadd(4, a, 64);
        } else {
            _tile_loadd(4, a, 64);
        }
    }

    template <bool kOnce>
    static void load_lower(const bf16* a) {
        if constexpr (kOnce) {
            _tile_stream_loadd(5, a, 64);
        } else {
            _tile_loadd(5, a, 64);
        }
    }

    // sums = before + a b, for 16 rows or, if has_two, 32. before: null for zeros. a_steps: tiles of a row of tiles.
    // Calls between(k) for each of the steps. Registers 0 to 3 hold sums, 4 and 5 rows, 6 and 7 columns; each is loaded
    // right after its last use.
    template <bool kOnce, class Between>
    static void multiply(bool has_two, const bf16* a, int64_t a_steps, const bf16* b, int64_t steps,
                         const float (*before)[kColumns], float (*sums)[kColumns], Between&& between) {
        if (has_two) return multiply_tiles<kOnce, true>(a, a_steps, b, steps, before, sums, between);
        multiply_tiles<kOnce, false>(a, a_steps, b, steps, before, sums, between);
    }

    template <bool kOnce, bool kTwo, class Between>
    static void multiply_tiles(const bf16* a, int64_t a_steps, const bf16* b, int64_t steps,
                               const float (*before)[kColumns], float (*sums)[kColumns], Between&& between) {
        const bf16* lower = a + a_steps * TileRows::kSize;
        if (before) {
            _tile_loadd(0, before[0], kLine);
            _tile_loadd(1, before[0] + V::W, kLine);
            if (kTwo) {
                _tile_loadd(2, before[TileRows::kRows], kLine);
                _tile_loadd(3, before[TileRows::kRows] + V::W, kLine);
            }
        } else {
            _tile_zero(0);
            _tile_zero(1);
            if (kTwo) {
                _tile_zero(2);
                _tile_zero(3);
            }
        }
        load_upper<kOnce>(a);
        _tile_loadd(6, b, kLine);
        _tile_loadd(7, b + kColumns, kLine);
        if (kTwo) load_lower<kOnce>(lower);
        for (int64_t k = 0;; k++) {
            between(k);
            a += TileRows::kSize;
            lower += TileRows::kSize;
            b += kStep;
            const bool is_last = k + 1 == steps;
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (!is_last) load_upper<kOnce>(a);
            if (kTwo) _tile_dpbf16ps(2, 5, 6);
            if (!is_last) _tile_loadd(6, b, kLine);
            if (kTwo) _tile_dpbf16ps(3, 5, 7);
            if (is_last) break;
            if (kTwo) load_lower<kOnce>(lower);
            _tile_loadd(7, b + kColumns, kLine);
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
