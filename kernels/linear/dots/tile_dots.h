// Dot products of 8-bit and 4-bit weights with 8-bit inputs, by AMX tiles: an instruction multiplies 16 rows x 32 inputs
// by 32 inputs x 16 columns of a block.
//
// The integers of a block are exact, and what is done with them is a part of dots_vnni.h: results are bitwise those of
// the other paths, and of this one for few rows.
#pragma once

#include <atomic>
#include <optional>

#include "../../native/cpp/amx.h"
#include "dots_vnni.h"

namespace octavo {

constexpr int64_t kTileGroup = 16;

// Returns a panel's weights as bytes, [block][quad of inputs][column][4], `step` bytes a block.
template <bool kGrouped>
const char* open_panel(const Int8Dots<kGrouped, kTileGroup>&, const char* panel, int64_t, int64_t& step) {
    step = Int8Dots<kGrouped>::kBlockBytes;
    return panel;
}

// Unpacks nibbles.
template <bool kZeros>
const char* open_panel(const Int4Dots<kZeros, kTileGroup>&, const char* panel, int64_t blocks, int64_t& step) {
    constexpr int64_t kQuads = 4 * kPanel<V16>;
    step = kBlock / 4 * kQuads;
    char* opened = static_cast<char*>(scratch(kSlotTile, blocks * step));
    for (int64_t b = 0; b < blocks; b++, panel += Int4Dots<kZeros>::kBlockBytes) {
        for (int64_t i = 0; i < kBlock / 8 * kQuads; i += 64) {
            const __m512i both = load_bytes(panel + i);
            char* place = opened + b * step + i / kQuads * 2 * kQuads + i % kQuads;
            _mm512_storeu_si512(place, low_nibbles(both));
            _mm512_storeu_si512(place + kQuads, high_nibbles(both));
        }
    }
    return opened;
}

template <class Dots>
struct TileDots : Dots {
    using V = V16;
    using Inputs = typename Dots::Inputs;
    static constexpr int kRows = kTileGroup;

    // Tile registers for a thread's share of a linear.
    struct Task {
        explicit Task(int64_t rows) {
            if (rows >= kFewest) tiles.emplace(kShapes);
        }
        std::optional<TilesInUse> tiles;
    };

    // Computes rows [first, last) times panel p.
    template <class Output>
    static void panel(const Inputs& inputs, int64_t first, int64_t last, const char* panel, const char* next, int64_t p,
                      const Output& output) {
        if (last - first < kFewest) return Dots::panel(inputs, first, last, panel, next, p, output);
        const int64_t groups = (last - first + kRows - 1) / kRows;
        int64_t step;
        const char* weights = open_panel(Dots(), panel, inputs.blocks, step);
        // The compiler does not know that tile instructions read memory.
        std::atomic_signal_fence(std::memory_order_seq_cst);
        for (int64_t n = 0; n < groups; n++) {
            const int64_t top = first + n * kRows, rows = std::min<int64_t>(kRows, last - top);
            for (int64_t r = 0; groups > 1 && r < rows; r++) output.prefetch(top + r, p);
            V sums[kRows][2];
            unroll<2>([&](auto v) OCTAVO_INLINED {
                const int64_t share = 2 * n + v, shares = 2 * groups;
                half<v>(inputs, inputs.place(top), weights, step, panel,
                        {next + (next - panel) * share / shares, Dots::kBlockBytes / shares}, sums);
            });
            for (int64_t r = 0; r < rows; r++) output.panel(sums[r], top + r, p);
        }
    }

   private:
    // With fewer rows vpdpbusd takes less time: see docs/architecture.md.
    static constexpr int64_t kFewest = 32;
    // Blocks whose integers are computed before they are scaled. What tiles store cannot be loaded at once.
    static constexpr int64_t kPhase = 6;
    // Registers 0 to 3 hold sums, 4 and 5 rows (32 inputs), 6 and 7 columns (8 quads).
    static constexpr TileShapes kShapes = {
        1, 0, {}, {64, 64, 64, 64, 32, 32, 64, 64}, {16, 16, 16, 16, 16, 16, 8, 8}};

    // Computes the sums of 16 rows for half v of a panel. place: of the first row's block 0. Each half prefetches a share
    // of the next panel, so that memory is read at an even pace.
    template <int v>
    __attribute__((noinline)) static void half(const Inputs& inputs, int64_t place, const char* weights, int64_t step,
                                               const char* panel, AheadOfBlocks ahead, V (&sums)[kRows][2]) {
        alignas(64) int32_t integers[kPhase][kRows][V::W];
        V acc[kRows];
        clear(acc);
        for (int64_t begin = 0; begin < inputs.blocks; begin += kPhase) {
            const int64_t count = std::min(kPhase, inputs.blocks - begin);
            for (int64_t i = 0; i < count; i++, weights += step) {
                ahead(begin + i);
                _tile_loadd(4, inputs.values + (place + i * kRows) * kBlock, kBlock);
                _tile_loadd(6, weights + v * 4 * V::W, 4 * kPanel<V>);
                _tile_zero(0);
                _tile_dpbsud(0, 4, 6);
                _tile_stored(0, integers[i], sizeof integers[i][0]);
            }
            for (int64_t i = 0; i < count; i++, place += kRows, panel += Dots::kBlockBytes) {
                Dots::template add_block<v>(acc, inputs, place, panel, [&](auto r) OCTAVO_INLINED {
                    return Dots::from_zero(load_bytes(integers[i][r]), inputs, place + r);
                });
            }
        }
        Dots::template finish<v>(acc, panel, sums);
    }
};

}  // namespace octavo
