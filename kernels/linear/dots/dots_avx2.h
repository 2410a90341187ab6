// Dot products of 8-bit and 4-bit weights with 8-bit inputs, by AVX2. A panel has 16 columns.
#pragma once

#include "../../native/cpp/unroll.h"
#include "bf16/dots_fixed.h"
#include "int4_panels.h"
#include "quantized.h"

namespace octavo {

// Like add_products in dots_fixed.h, for 16 pairs of bytes; those in `column` are unsigned.
inline void add_int4_products(__m256i& sum, __m256i x, __m256i column) {
    __m256i products;
    asm("vpmaddubsw %1, %2, %0" : "=x"(products) : "x"(x), "x"(column));
    asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(products));
}

inline __m256i all_32_bits(const void* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    return _mm256_set1_epi32(bits);
}

// Loads 8 halves as floats.
inline V8 load_halves(const char* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}

// Inputs are held in 16 bits, and weights are widened to 16: vpmaddwd multiplies pairs of them and adds the two
// products, which cannot overflow. (vpmaddubsw takes 8 bits, but saturates.)
//
// A panel is [block][pair of inputs][column][2]. If weights are grouped, each block's scales, 16 halves, follow it; if
// not, the columns' scales, 16 floats, follow all blocks.
template <bool kGrouped>
struct Int8Dots : TileByTile<Int8Dots<kGrouped>> {
    using V = V8;
    using Inputs = QuantizedRows<int16_t, V8, 12>;
    using Value = Inputs::Value;
    static constexpr int kRows = 6;
    static constexpr int64_t kUnaided = 4;  // see dots_vnni.h
    static constexpr int64_t kColumns = kPanel<V>;
    static constexpr int64_t kValueBytes = kBlock * kColumns;
    static constexpr int64_t kScaleBytes = kColumns * sizeof(uint16_t);
    static constexpr int64_t kBlockBytes = kValueBytes + (kGrouped ? kScaleBytes : 0);
    static constexpr int64_t kPanelBytes = kGrouped ? 0 : kColumns * sizeof(float);

    static void pack(const Linear& linear, const WeightRows& weights, int64_t p, char* panel) {
        const int64_t inputs = linear.inputs, blocks = num_blocks(inputs);
        for (int64_t c = 0; c < kColumns; c++) {
            const int64_t row = weight_row<V>(linear, p, c);
            if (row < 0) continue;
            const int8_t* values = weights.row<int8_t>(row, inputs);
            for (int64_t i = 0; i < inputs; i++) {
                panel[i / kBlock * kBlockBytes + i % kBlock / 2 * 2 * kColumns + c * 2 + i % 2] =
                    values[i];
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
        int64_t place = rows.place(first);
        for (int64_t b = 0; b < rows.blocks; b++, place += rows.apart, panel += kBlockBytes) {
            ahead(b);
            const Value* values = rows.values + place * kBlock;
            const float* scales = rows.scales + place;
            __m256i dots[R][2];
            unroll<R>([&](auto r) OCTAVO_INLINED { dots[r][0] = dots[r][1] = _mm256_setzero_si256(); });
            for (int k = 0; k < kBlock / 2; k++) {
                const __m128i* pairs = reinterpret_cast<const __m128i*>(panel + k * 2 * kColumns);
                const __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128(pairs));
                const __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128(pairs + 1));
                unroll<R>([&](auto r) OCTAVO_INLINED {
                    const __m256i x = all_32_bits(values + r * kBlock + 2 * k);
                    add_products(dots[r][0], x, low);
                    add_products(dots[r][1], x, high);
                });
            }
            V of_columns[2] = {};
            if constexpr (kGrouped) {
                of_columns[0] = load_halves(panel + kValueBytes);
                of_columns[1] = load_halves(panel + kValueBytes + kScaleBytes / 2);
            }
            unroll<R>([&](auto r) OCTAVO_INLINED {
                const V scale = V::all(scales[r]);
                unroll<2>([&](auto v) OCTAVO_INLINED {
                    const V both = kGrouped ? of_columns[v] * scale : scale;
                    acc[r][v] = fma({_mm256_cvtepi32_ps(dots[r][v])}, both, acc[r][v]);
                });
            });
        }
        if constexpr (!kGrouped) {
            for (int v = 0; v < 2; v++) {
                const V scale = V::load(reinterpret_cast<const float*>(panel) + 8 * v);
                for (int r = 0; r < R; r++) acc[r][v] = acc[r][v] * scale;
            }
        }
    }
};

// Weights are the unsigned operand of vpmaddubsw, inputs the signed one. A pair of products adds up to at most 3,810,
// and 16 bits hold the sum of the 8 pairs of a block in each of a column's two lanes.
//
// kZeros: what follows the scales are zeros, negative; a minimum is a scale times that, exactly.
template <bool kZeros>
struct Int4Dots : Int4Panels<V8>, TileByTile<Int4Dots<kZeros>> {
    using V = V8;
    using Inputs = QuantizedRows<int8_t, V8, 12>;
    using Value = Inputs::Value;
    static constexpr int kRows = 6;
    static constexpr int64_t kUnaided = 2;

    template <int R, class Fetch>
    __attribute__((noinline)) static void sums(V (&acc)[R][2], const Inputs& rows, int64_t first,
                                               const char* panel, Fetch ahead) {
        const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
        for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = V::zero();
        int64_t place = rows.place(first);
        for (int64_t b = 0; b < rows.blocks; b++, place += rows.apart, panel += kBlockBytes) {
            ahead(b);
            const Value* values = rows.values + place * kBlock;
            const float* scales = rows.scales + place;
            const float* offsets = rows.offsets + place;
            __m256i dots[R][2];
            unroll<kBlock / 8>([&](auto k) OCTAVO_INLINED {
                const __m256i* quads = reinterpret_cast<const __m256i*>(panel + k * 4 * kColumns);
                unroll<2>([&](auto half) OCTAVO_INLINED {
                    __m256i columns[2];
                    unroll<2>([&](auto v) OCTAVO_INLINED {
                        const __m256i both = _mm256_loadu_si256(quads + v);
                        columns[v] = _mm256_and_si256(half ? _mm256_srli_epi16(both, 4) : both, nibble);
                    });
                    unroll<R>([&](auto r) OCTAVO_INLINED {
                        const __m256i x = all_32_bits(values + r * kBlock + 8 * k + 4 * half);
                        unroll<2>([&](auto v) OCTAVO_INLINED {
                            if constexpr (k + half == 0) {
                                dots[r][v] = _mm256_maddubs_epi16(columns[v], x);
                            } else {
                                add_int4_products(dots[r][v], x, columns[v]);
                            }
                        });
                    });
                });
            });
            const V of_columns[2] = {load_halves(panel + kValueBytes),
                                     load_halves(panel + kValueBytes + kScaleBytes / 2)};
            V minima[2] = {load_halves(panel + kValueBytes + kScaleBytes),
                           load_halves(panel + kValueBytes + kScaleBytes * 3 / 2)};
            if constexpr (kZeros) {
                for (int v = 0; v < 2; v++) minima[v] = minima[v] * of_columns[v];
            }
            unroll<R>([&](auto r) OCTAVO_INLINED {
                const V scale = V::all(scales[r]), offset = V::all(offsets[r]);
                unroll<2>([&](auto v) OCTAVO_INLINED {
                    const V dot = {_mm256_cvtepi32_ps(_mm256_madd_epi16(dots[r][v], ones))};
                    acc[r][v] = fma(minima[v], offset, fma(dot, of_columns[v] * scale, acc[r][v]));
                });
            });
        }
    }
};

}  // namespace octavo
