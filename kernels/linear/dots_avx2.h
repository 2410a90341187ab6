// Dot products of weights in 8 and 4 bits with 8-bit inputs, by AVX2. 16 columns are a panel.
#pragma once

#include "quantized.h"

namespace octavo {

// What was added stays so: left alone, compilers first take all products of a step, and then add them, with more of both
// than there are registers.
inline void keep(__m256i& sum) { asm("" : "+x"(sum)); }

inline __m256i all_32_bits(const void* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    return _mm256_set1_epi32(bits);
}

// 8 halves as floats.
inline V8 load_halves(const char* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}

// weight row behind column c, block b: what to copy of a row-major [rows, blocks] of halves.
inline void pack_halves(const uint16_t* halves, int64_t row, int64_t blocks, int64_t c, int64_t b, char* place) {
    if (row >= 0) std::memcpy(place + c * sizeof(uint16_t), halves + row * blocks + b, sizeof(uint16_t));
}

// Inputs are held in 16 bits, and weights widened to as many: vpmaddwd multiplies pairs of them and adds the two
// products, and cannot overflow. (vpmaddubsw takes 8 bits, and saturates.)
//
// A panel is [block][pair of inputs][column][2], with each block's scales, 16 halves, behind it if weights are grouped;
// else 16 floats, the columns' scales, are behind all blocks.
template <bool kGrouped>
struct Int8Dots {
    using V = V8;
    using Value = int16_t;
    static constexpr int kRows = 4;
    static constexpr int64_t kColumns = kPanel<V>;
    static constexpr int64_t kValueBytes = kBlock * kColumns;
    static constexpr int64_t kBlockBytes = kValueBytes + (kGrouped ? kColumns * sizeof(uint16_t) : 0);
    static constexpr int64_t kPanelBytes = kGrouped ? 0 : kColumns * sizeof(float);

    static void pack(const Linear& linear, const QuantizedWeights& weights, int64_t p, char* panel) {
        const int64_t inputs = linear.inputs, blocks = num_blocks(inputs);
        for (int64_t c = 0; c < kColumns; c++) {
            const int64_t row = weight_row<V>(linear, p, c);
            if (row < 0) continue;
            for (int64_t i = 0; i < inputs; i++) {
                panel[i / kBlock * kBlockBytes + i % kBlock / 2 * 2 * kColumns + c * 2 + i % 2] =
                    weights.values[row * inputs + i];
            }
            if constexpr (kGrouped) {
                for (int64_t b = 0; b < blocks; b++) {
                    pack_halves(static_cast<const uint16_t*>(weights.scales), row, blocks, c, b,
                                panel + b * kBlockBytes + kValueBytes);
                }
            } else {
                std::memcpy(panel + blocks * kBlockBytes + c * sizeof(float),
                            static_cast<const float*>(weights.scales) + row, sizeof(float));
            }
        }
    }

    template <int R, class Fetch>
    static void sums(V (&acc)[R][2], const QuantizedRows<Value>& rows, int64_t first, const char* panel, Fetch ahead) {
        const int64_t width = rows.blocks * kBlock;
        for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = V::zero();
        for (int64_t b = 0; b < rows.blocks; b++, panel += kBlockBytes) {
            ahead(b);
            const Value* values = rows.values + first * width + b * kBlock;
            const float* scales = rows.scales + first * rows.blocks + b;
            __m256i dots[R][2];
            for (int r = 0; r < R; r++) dots[r][0] = dots[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 16
            for (int k = 0; k < kBlock / 2; k++) {
                const __m128i* pairs = reinterpret_cast<const __m128i*>(panel + k * 2 * kColumns);
                const __m256i columns[2] = {_mm256_cvtepi8_epi16(_mm_loadu_si128(pairs)),
                                            _mm256_cvtepi8_epi16(_mm_loadu_si128(pairs + 1))};
                for (int r = 0; r < R; r++) {
                    const __m256i x = all_32_bits(values + r * width + 2 * k);
                    for (int v = 0; v < 2; v++) {
                        dots[r][v] = _mm256_add_epi32(dots[r][v], _mm256_madd_epi16(x, columns[v]));
                        keep(dots[r][v]);
                    }
                }
            }
            for (int v = 0; v < 2; v++) {
                V of_columns = V::zero();
                if constexpr (kGrouped) of_columns = load_halves(panel + kValueBytes + 16 * v);
                for (int r = 0; r < R; r++) {
                    V scale = V::all(scales[r * rows.blocks]);
                    if constexpr (kGrouped) scale = of_columns * scale;
                    acc[r][v] = fma({_mm256_cvtepi32_ps(dots[r][v])}, scale, acc[r][v]);
                }
            }
        }
        if constexpr (!kGrouped) {
            for (int v = 0; v < 2; v++) {
                const V scale = V::load(reinterpret_cast<const float*>(panel) + 8 * v);
                for (int r = 0; r < R; r++) acc[r][v] = acc[r][v] * scale;
            }
        }
    }
};

// Weights are the unsigned operand of vpmaddubsw, inputs the signed one. A pair of products is at most 3,810, and 16 bits
// hold the sum of the 8 pairs that a block has for each of a column's two lanes.
//
// A panel is [block]{[2 quads of inputs, as low and as high nibbles][column][4], 16 halves of scales, 16 of minima}.
struct Int4Dots {
    using V = V8;
    using Value = int8_t;
    static constexpr int kRows = 6;
    static constexpr int64_t kColumns = kPanel<V>;
    static constexpr int64_t kValueBytes = kBlock * kColumns / 2;
    static constexpr int64_t kScaleBytes = kColumns * sizeof(uint16_t);
    static constexpr int64_t kBlockBytes = kValueBytes + 2 * kScaleBytes;
    static constexpr int64_t kPanelBytes = 0;

    static void pack(const Linear& linear, const QuantizedWeights& weights, int64_t p, char* panel) {
        const int64_t inputs = linear.inputs, blocks = num_blocks(inputs);
        for (int64_t c = 0; c < kColumns; c++) {
            const int64_t row = weight_row<V>(linear, p, c);
            if (row < 0) continue;
            for (int64_t i = 0; i < inputs; i++) {
                char& both = panel[i / kBlock * kBlockBytes + i % kBlock / 8 * 4 * kColumns + c * 4 + i % 4];
                both = static_cast<char>(both | weights.values[row * inputs + i] << (i % 8 < 4 ? 0 : 4));
            }
            for (int64_t b = 0; b < blocks; b++) {
                char* scales = panel + b * kBlockBytes + kValueBytes;
                pack_halves(static_cast<const uint16_t*>(weights.scales), row, blocks, c, b, scales);
                pack_halves(weights.minima, row, blocks, c, b, scales + kScaleBytes);
            }
        }
    }

    template <int R, class Fetch>
    static void sums(V (&acc)[R][2], const QuantizedRows<Value>& rows, int64_t first, const char* panel, Fetch ahead) {
        const int64_t width = rows.blocks * kBlock;
        const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
        for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = V::zero();
        for (int64_t b = 0; b < rows.blocks; b++, panel += kBlockBytes) {
            ahead(b);
            const Value* values = rows.values + first * width + b * kBlock;
            const float* scales = rows.scales + first * rows.blocks + b;
            const float* offsets = rows.offsets + first * rows.blocks + b;
            __m256i dots[R][2];
            for (int r = 0; r < R; r++) dots[r][0] = dots[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 4
            for (int k = 0; k < kBlock / 8; k++) {
                const __m256i* quads = reinterpret_cast<const __m256i*>(panel + k * 4 * kColumns);
                const __m256i both[2] = {_mm256_loadu_si256(quads), _mm256_loadu_si256(quads + 1)};
                for (int half = 0; half < 2; half++) {
                    __m256i columns[2];
                    for (int v = 0; v < 2; v++) {
                        columns[v] = _mm256_and_si256(half ? _mm256_srli_epi16(both[v], 4) : both[v], nibble);
                    }
                    for (int r = 0; r < R; r++) {
                        const __m256i x = all_32_bits(values + r * width + 8 * k + 4 * half);
                        for (int v = 0; v < 2; v++) {
                            dots[r][v] = _mm256_add_epi16(dots[r][v], _mm256_maddubs_epi16(columns[v], x));
                            keep(dots[r][v]);
                        }
                    }
                }
            }
            for (int v = 0; v < 2; v++) {
                const V of_columns = load_halves(panel + kValueBytes + 16 * v);
                const V minima = load_halves(panel + kValueBytes + kScaleBytes + 16 * v);
                for (int r = 0; r < R; r++) {
                    const V dot = {_mm256_cvtepi32_ps(_mm256_madd_epi16(dots[r][v], ones))};
                    acc[r][v] = fma(dot, of_columns * V::all(scales[r * rows.blocks]), acc[r][v]);
                    acc[r][v] = fma(minima, V::all(offsets[r * rows.blocks]), acc[r][v]);
                }
            }
        }
    }
};

}  // namespace octavo
