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

namespace octavo {

// A tile of 6 rows keeps a block's integers and the sums of all blocks in 2 x 6 x 2 of the 32 registers.
constexpr int kDotRows = 6;

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

// Loads 16 halves as floats.
inline V16 load_halves(const char* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

// Weights are stored with 128 added; sums start at -128 times the inputs to correct for it.
//
// A panel is [block][quad of inputs][column][4]. If weights are grouped, each block's scales, 32 halves, follow it; if
// not, the columns' scales, 32 floats, follow all blocks.
template <bool kGrouped>
struct Int8Dots : TileByTile<Int8Dots<kGrouped>> {
    using V = V16;
    using Inputs = QuantizedRows<int8_t>;
    using Value = Inputs::Value;
    static constexpr int kRows = kDotRows;
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
    __attribute__((noinline)) static void sums(V (&acc)[R][2], const Inputs& rows, int64_t first,
                                               const char* panel, Fetch ahead) {
        for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = V::zero();
        for (int64_t b = 0; b < rows.blocks; b++, panel += kBlockBytes) {
            ahead(b);
            const int64_t place = b * rows.rows + first;
            const Value* values = rows.values + place * kBlock;
            __m512i dots[R][2];
            unroll<R>([&](auto r) OCTAVO_INLINED {
                dots[r][0] = dots[r][1] = _mm512_set1_epi32(rows.starts[place + r]);
            });
            unroll<kBlock / 4>([&](auto k) OCTAVO_INLINED {
                add_dots<R>(dots, values + 4 * k, load_bytes(panel + k * 128), load_bytes(panel + k * 128 + 64));
            });
            V of_columns[2] = {};
            if constexpr (kGrouped) {
                of_columns[0] = load_halves(panel + kValueBytes);
                of_columns[1] = load_halves(panel + kValueBytes + 32);
            }
            unroll<R>([&](auto r) OCTAVO_INLINED {
                const V scale = V::all(rows.scales[place + r]);
                unroll<2>([&](auto v) OCTAVO_INLINED {
                    const V both = kGrouped ? of_columns[v] * scale : scale;
                    acc[r][v] = fma({_mm512_cvtepi32_ps(dots[r][v])}, both, acc[r][v]);
                });
            });
        }
        if constexpr (!kGrouped) {
            for (int v = 0; v < 2; v++) {
                const V scale = V::load(reinterpret_cast<const float*>(panel) + 16 * v);
                for (int r = 0; r < R; r++) acc[r][v] = acc[r][v] * scale;
            }
        }
    }
};

// kZeros: what follows the scales are zeros, negative; a minimum is a scale times that, exactly.
template <bool kZeros>
struct Int4Dots : Int4Panels<V16>, TileByTile<Int4Dots<kZeros>> {
    using V = V16;
    using Inputs = QuantizedRows<int8_t>;
    using Value = Inputs::Value;
    static constexpr int kRows = kDotRows;

    template <int R, class Fetch>
    __attribute__((noinline)) static void sums(V (&acc)[R][2], const Inputs& rows, int64_t first,
                                               const char* panel, Fetch ahead) {
        const __m512i nibble = _mm512_set1_epi8(15);
        for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = V::zero();
        for (int64_t b = 0; b < rows.blocks; b++, panel += kBlockBytes) {
            ahead(b);
            const int64_t place = b * rows.rows + first;
            const Value* values = rows.values + place * kBlock;
            __m512i dots[R][2];
            unroll<R>([&](auto r) OCTAVO_INLINED { dots[r][0] = dots[r][1] = _mm512_setzero_si512(); });
            unroll<kBlock / 8>([&](auto k) OCTAVO_INLINED {
                const __m512i low = load_bytes(panel + k * 128), high = load_bytes(panel + k * 128 + 64);
                add_dots<R>(dots, values + 8 * k, _mm512_and_si512(low, nibble), _mm512_and_si512(high, nibble));
                add_dots<R>(dots, values + 8 * k + 4, _mm512_and_si512(_mm512_srli_epi16(low, 4), nibble),
                            _mm512_and_si512(_mm512_srli_epi16(high, 4), nibble));
            });
            unroll<2>([&](auto v) OCTAVO_INLINED {
                const V of_columns = load_halves(panel + kValueBytes + 32 * v);
                const V stored = load_halves(panel + kValueBytes + kScaleBytes + 32 * v);
                const V minima = kZeros ? stored * of_columns : stored;
                unroll<R>([&](auto r) OCTAVO_INLINED {
                    const V dot = {_mm512_cvtepi32_ps(dots[r][v])};
                    acc[r][v] = fma(dot, of_columns * V::all(rows.scales[place + r]), acc[r][v]);
                    acc[r][v] = fma(minima, V::all(rows.offsets[place + r]), acc[r][v]);
                });
            });
        }
    }
};

}  // namespace octavo
