// AMX's tiles of bf16 and bytes in plain C++, for machines without them: what Intel's manual says of TDPBF16PS and
// TDPBSUD, tile by tile. Results equal the hardware's, except that denormal numbers are not taken as 0.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated {

struct Tile {
    int rows, bytes;  // 0 where no shape is loaded
    unsigned char data[16][64];
};

inline thread_local Tile tiles[8];

inline Tile& tile(int number) {
    if (tiles[number].rows == 0) std::abort();  // the CPU would stop the process, too
    return tiles[number];
}

inline void load_shapes(const void* shapes) {
    const auto* bytes = static_cast<const unsigned char*>(shapes);
    if (bytes[0] != 1) std::abort();
    for (int i = 0; i < 8; i++) {
        uint16_t width;
        std::memcpy(&width, bytes + 16 + 2 * i, 2);
        tiles[i] = {bytes[48 + i], width, {}};
        if (tiles[i].rows > 16 || width > 64) std::abort();
    }
}

inline void release() { std::memset(tiles, 0, sizeof tiles); }

inline void zero(int to) { std::memset(tile(to).data, 0, sizeof tiles[to].data); }

inline void load(int to, const void* from, int64_t stride) {
    zero(to);
    for (int r = 0; r < tiles[to].rows; r++) {
        std::memcpy(tiles[to].data[r], static_cast<const char*>(from) + r * stride, tiles[to].bytes);
    }
}

inline void store(int from, void* to, int64_t stride) {
    for (int r = 0; r < tile(from).rows; r++) {
        std::memcpy(static_cast<char*>(to) + r * stride, tiles[from].data[r], tiles[from].bytes);
    }
}

inline float number(const unsigned char* place) {
    uint16_t half;
    std::memcpy(&half, place, 2);
    const uint32_t bits = uint32_t{half} << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// sums += a b, where b holds pairs of rows side by side.
inline void multiply(int sums, int a, int b) {
    Tile &c = tile(sums), &left = tile(a), &right = tile(b);
    for (int r = 0; r < c.rows; r++) {
        for (int n = 0; n < c.bytes / 4; n++) {
            float even = 0.0f, odd = 0.0f, sum;
            for (int k = 0; k < left.bytes / 4; k++) {
                even = std::fma(number(left.data[r] + 4 * k), number(right.data[k] + 4 * n), even);
                odd = std::fma(number(left.data[r] + 4 * k + 2), number(right.data[k] + 4 * n + 2), odd);
            }
            std::memcpy(&sum, c.data[r] + 4 * n, 4);
            sum += even + odd;
            std::memcpy(c.data[r] + 4 * n, &sum, 4);
        }
    }
}

// Like multiply, for integers: signed bytes of a times unsigned bytes of b, which holds fours of rows side by side.
inline void multiply_bytes(int sums, int a, int b) {
    Tile &c = tile(sums), &left = tile(a), &right = tile(b);
    for (int r = 0; r < c.rows; r++) {
        for (int n = 0; n < c.bytes / 4; n++) {
            int32_t sum;
            std::memcpy(&sum, c.data[r] + 4 * n, 4);
            for (int k = 0; k < left.bytes; k++) {
                sum += static_cast<int8_t>(left.data[r][k]) * right.data[k / 4][4 * n + k % 4];
            }
            std::memcpy(c.data[r] + 4 * n, &sum, 4);
        }
    }
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig emulated::load_shapes
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stream_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::multiply
#define _tile_dpbsud emulated::multiply_bytes
