// Dot products of 8-bit and 4-bit weights with 8-bit inputs, by AVX512_VNNI. A panel has 32 columns.
//
// vpdpbusd adds four products of an unsigned and a signed byte to 32 bits, exactly. Weights are the unsigned bytes,
// inputs the signed ones. Integers and the order of floats are those of dots_avx2.h, and so results are bitwise equal.
//
// A block of 6 rows needs 96 vpdpbusd: at least 48 cycles. In llvm-mca's model of Ice Lake it takes 73 with 8-bit
// weights, 77 if those are grouped, and 108 with 4-bit ones: the scaling of a block's integers uses the same two ports.
#pragma once

#include <cstring>

#include "../../native/cpp/unroll.h"
#include "../../native/cpp/vec16.h"
#include "int4_panels.h"
#include "quantized.h"
#include "quantized_rows16.h"

namespace octavo {

// A tile of 6 rows keeps a block's integers and the sums of all blocks in 2 x 6 x 2 of the 32 registers.
constexpr int kDotRows = 6;
constexpr int64_t kDotGroup = 2 * kDotRows;

inline __m512i load_bytes(const void* p) { return _mm512_loadu_si512(p); }

inline __m512i all_quads(const int8_t* p) {
    int32_t quad;
    std::memcpy(&quad, p, 4);
    return _mm512_set1_epi32(quad);
}

// dots[r][v] += the four inputs of row r at x, times four weights of each column.
template <int R>
OCTAVO_INLINED inline void add_dots(__m512i (&dots)[R][2], const int8_t* x, __m512i low, __m512i high) {
    unroll<R>([&](auto r) OCTAVO_INLINED {
        const __m512i quad = all_quads(x + r * kBlock);
        dots[r][0] = _mm512_dpbusd_epi32(dots[r][0], low, quad);
        dots[r][1] = _mm512_dpbusd_epi32(dots[r][1], high, quad);
    });
}

inline __m512i low_nibbles(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }

inline __m512i high_nibbles(__m512i bytes) { return low_nibbles(_mm512_srli_epi16(bytes, 4)); }

template <int R>
OCTAVO_INLINED inline void clear(V16 (&acc)[R]) {
    unroll<R>([&](auto r) OCTAVO_INLINED { acc[r] = V16::zero(); });
}

// Loads 16 halves as floats.
inline V16 load_halves(const char* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

// Weights are stored with 128 added; sums start at -128 times the inputs to correct for it.
//
// A panel is [block][quad of inputs][column][4]. If weights are grouped, each block's scales, 32 halves, follow it; if
// not, the columns' scales, 32 floats, follow all blocks.
template <bool kGrouped, int64_t kGroup = kDotGroup>
struct Int8Dots : TileByTile<Int8Dots<kGrouped, kGroup>> {
    using V = V16;
    using Inputs = QuantizedRows<int8_t, V16, kGroup>;
    using Value = int8_t;
    static constexpr int kRows = kDotRows;
    static constexpr int64_t kUnaided = 4;  // 1 row: 4.1 ms on a Zen 4 for SmolLM2's linears, not 4.4; 4 rows: 4.5, not 5.0
    static constexpr int64_t kColumns = kPanel<V>;
    static constexpr int64_t kValueBytes = kBlock * kColumns;
    static constexpr int64_t kBlockBytes = kValueBytes + (kGrouped ? kColumns * sizeof(uint16_t) : 0);
    static constexpr int64_t kPanelBytes = kGrouped ? 0 : kColumns * sizeof(float);

    static void pack(const Linear& linear, const WeightRows& weights, int64_t p, char* panel) {
        const int64_t inputs = linear.inputs, blocks = num_blocks(inputs);
        for (int64_t c = 0; c < kColumns; c++) {
            const int64_t row = weight_row<V>(linear, p, c);
            if (row < 0) continue;
            const int8_t* values = weights.row<int8_t>(row, inputs);
            for (int64_t i = 0; i < inputs; i++) {
                panel[i / kBlock * kBlockBytes + i % kBlock / 4 * 4 * kColumns + c * 4 + i % 4] =
                    static_cast<char>(values[i] + 128);
            }
            if constexpr (kGrouped) {
                for (int64_t b = 0; b < blocks; b++) {
                    pack_half(static_cast<const uint16_t*>(weights.scales)[row * blocks + b], c,
                              panel + b * kBlockBytes + kValueBytes);
                }
            } else {
                std::memcpy(panel + blocks * kBlockBytes + c * sizeof(float),
                            static_cast<const float*>(weights.scales) + row, sizeof(float));
            }
        }
    }

    template <int R, class Fetch>
    __attribute__((noinline)) static void sums(V (&result)[R][2], const Inputs& rows, int64_t first,
                                               const char* panel, Fetch ahead) {
        V acc[2][R];
        clear(acc[0]);
        clear(acc[1]);
        int64_t place = rows.place(first);
        for (int64_t b = 0; b < rows.blocks; b++, place += rows.apart, panel += kBlockBytes) {
            ahead(b);
            const Value* values = rows.values + place * kBlock;
            __m512i dots[R][2];
            unroll<R>([&](auto r) OCTAVO_INLINED {
                dots[r][0] = dots[r][1] = _mm512_set1_epi32(rows.starts[place + r]);
            });
            unroll<kBlock / 4>([&](auto k) OCTAVO_INLINED {
                add_dots<R>(dots, values + 4 * k, load_bytes(panel + k * 128), load_bytes(panel + k * 128 + 64));
            });
            unroll<2>([&](auto v) OCTAVO_INLINED {
                add_block<v>(acc[v], rows, place, panel, [&](auto r) OCTAVO_INLINED { return dots[r][v]; });
            });
        }
        finish<0>(acc[0], panel, result);
        finish<1>(acc[1], panel, result);
    }

    // The integers of a row whose sums started at 0. place: of the row's block.
    static __m512i from_zero(__m512i dots, const Inputs& rows, int64_t place) {
        return _mm512_add_epi32(dots, _mm512_set1_epi32(rows.starts[place]));
    }

    // acc += the integers dots(r) of a block, scaled, for half v of the columns. place: of the first row's block; block:
    // that of the panel.
    template <int v, int R, class Integers>
    OCTAVO_INLINED static void add_block(V (&acc)[R], const Inputs& rows, int64_t place, const char* block,
                                         Integers&& dots) {
        const V of_columns = kGrouped ? load_halves(block + kValueBytes + 32 * v) : V::all(1.0f);
        unroll<R>([&](auto r) OCTAVO_INLINED {
            const V scale = V::all(rows.scales[place + r]);
            acc[r] = fma({_mm512_cvtepi32_ps(dots(r))}, kGrouped ? of_columns * scale : scale, acc[r]);
        });
    }

    // Fills half v of the result from the sums of all blocks. end: of the panel's blocks.
    template <int v, int R>
    OCTAVO_INLINED static void finish(const V (&acc)[R], const char* end, V (&result)[R][2]) {
        const V scale = kGrouped ? V::all(1.0f) : V::load(reinterpret_cast<const float*>(end) + 16 * v);
        unroll<R>([&](auto r) OCTAVO_INLINED { result[r][v] = kGrouped ? acc[r] : acc[r] * scale; });
    }
};

// kZeros: what follows the scales are zeros, negative; a minimum is a scale times that, exactly.
template <bool kZeros, int64_t kGroup = kDotGroup>
struct Int4Dots : Int4Panels<V16>, TileByTile<Int4Dots<kZeros, kGroup>> {
    using V = V16;
    using Inputs = QuantizedRows<int8_t, V16, kGroup>;
    using Value = int8_t;
    static constexpr int kRows = kDotRows;
    static constexpr int64_t kUnaided = 3;  // 1 row: 2.8 ms, not 3.1; 3 rows: 3.2, not 3.3

    template <int R, class Fetch>
    __attribute__((noinline)) static void sums(V (&result)[R][2], const Inputs& rows, int64_t first,
                                               const char* panel, Fetch ahead) {
        V acc[2][R];
        clear(acc[0]);
        clear(acc[1]);
        int64_t place = rows.place(first);
        for (int64_t b = 0; b < rows.blocks; b++, place += rows.apart, panel += kBlockBytes) {
            ahead(b);
            const Value* values = rows.values + place * kBlock;
            __m512i dots[R][2];
            unroll<R>([&](auto r) OCTAVO_INLINED { dots[r][0] = dots[r][1] = _mm512_setzero_si512(); });
            unroll<kBlock / 8>([&](auto k) OCTAVO_INLINED {
                const __m512i low = load_bytes(panel + k * 128), high = load_bytes(panel + k * 128 + 64);
                add_dots<R>(dots, values + 8 * k, low_nibbles(low), low_nibbles(high));
                add_dots<R>(dots, values + 8 * k + 4, high_nibbles(low), high_nibbles(high));
            });
            unroll<2>([&](auto v) OCTAVO_INLINED {
                add_block<v>(acc[v], rows, place, panel, [&](auto r) OCTAVO_INLINED { return dots[r][v]; });
            });
        }
        finish<0>(acc[0], panel, result);
        finish<1>(acc[1], panel, result);
    }

    static __m512i from_zero(__m512i dots, const Inputs&, int64_t) { return dots; }

    // acc += the integers dots(r) of a block, scaled, and its minima, for half v of the columns. place: of the first
    // row's block; block: that of the panel.
    template <int v, int R, class Integers>
    OCTAVO_INLINED static void add_block(V (&acc)[R], const Inputs& rows, int64_t place, const char* block,
                                         Integers&& dots) {
        const V of_columns = load_halves(block + kValueBytes + 32 * v);
        const V stored = load_halves(block + kValueBytes + kScaleBytes + 32 * v);
        const V minima = kZeros ? stored * of_columns : stored;
        unroll<R>([&](auto r) OCTAVO_INLINED {
            const V dot = {_mm512_cvtepi32_ps(dots(r))};
            acc[r] = fma(dot, of_columns * V::all(rows.scales[place + r]), acc[r]);
            acc[r] = fma(minima, V::all(rows.offsets[place + r]), acc[r]);
        });
    }

    template <int v, int R>
    OCTAVO_INLINED static void finish(const V (&acc)[R], const char*, V (&result)[R][2]) {
        unroll<R>([&](auto r) OCTAVO_INLINED { result[r][v] = acc[r]; });
    }
};

}  // namespace octavo
