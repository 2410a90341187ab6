// AMX's tile registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace octavo {

// The shapes of the 8 tile registers, in the layout of the instruction ldtilecfg.
struct alignas(64) TileShapes {
    uint8_t palette = 1, first_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr TileShapes kWholeTiles;

// Gives the calling thread its tile registers while it lives. Afterwards they are empty, so that the system need not
// save 8 KiB of them with each switch of threads.
struct TilesInUse {
    explicit TilesInUse(const TileShapes& shapes) {
        // GCC believes that the instruction reads 8 bytes, and may leave the others out of memory.
        __asm__ volatile("" : : "m"(shapes));
        _tile_loadconfig(&shapes);
    }
    ~TilesInUse() { _tile_release(); }
    TilesInUse(const TilesInUse&) = delete;
    TilesInUse& operator=(const TilesInUse&) = delete;
};

}  // namespace octavo
