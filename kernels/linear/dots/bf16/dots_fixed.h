// bf16 weights in block fixed point, for CPUs that multiply 16-bit integers faster than floats and have no bf16
// instructions (AVX2: as many instructions give 16 products and 8 sums of two as 8 products with sums in float32).
//
// 64 inputs of a row share a scale, and so do the 64 weights that they meet. Their products add up exactly in int32,
// and the blocks of a row in float32, in order. Weights have 13 bits, a sign, and a power of 2 as scale: weights above
// 1/32 of the largest of their 64 keep all bits of bf16.
// Shared exponents: "block floating point", J. H. Wilkinson, Rounding Errors in Algebraic Processes, 1963.
//
// Memory holds 12 bits of each weight, without loss, since reading weights limits a linear of few rows. A bf16 number
// has 8 significant bits, so a weight is a byte shifted by 0 to 5 bits: below 256 the byte itself, and above that the
// bits under the first 8 are all 0.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "../../../native/cpp/accumulate.h"
#include "../../../native/cpp/unroll.h"
#include "fixed_rows.h"
#include "../quantized.h"

namespace octavo {

// acc += x.first * column.first + x.second * column.second, in each of 8 pairs. Inline assembly, because compilers copy
// every sum to another register and back.
inline void add_products(__m256i& acc, __m256i x, __m256i column) {
    __m256i products;
    asm("vpmaddwd %2, %1, %0" : "=x"(products) : "x"(x), "x"(column));
    asm("vpaddd %1, %0, %0" : "+x"(acc) : "x"(products));
}

inline __m256i all_pairs(const int16_t* p) {
    __m256i pair;
    asm("vpbroadcastd %1, %0" : "=x"(pair) : "m"(*reinterpret_cast<const int32_t*>(p)));
    return pair;
}

// 64 weights of a row.
struct FixedWeights {
    static constexpr int kBits = 13;
    static_assert(FixedRows::kBlock * FixedRows::kLimit * ((1 << kBits) - 1) <= INT32_MAX);

    int values[FixedRows::kBlock] = {};
    // The biased exponent of the scale as a float. 255, infinity, if a weight is infinite or NaN: values are then 0,
    // and each sum becomes NaN, as it should.
    uint8_t exponent = 1;

    FixedWeights(const bf16* weights, int64_t count) {
        float most = 0.0f;
        for (int64_t i = 0; i < count; i++) {
            const float size = std::fabs(to_float(weights[i]));
            most = size <= most ? most : size;
        }
        if (!std::isfinite(most)) {
            exponent = 255;
            return;
        }
        int above = 0;
        std::frexp(most, &above);
        const int power = std::max(above - kBits, -126);
        exponent = static_cast<uint8_t>(power + 127);
        for (int64_t i = 0; i < count; i++) {
            values[i] = static_cast<int>(std::nearbyint(std::ldexp(to_float(weights[i]), -power)));
        }
    }
};

// A block of a panel in memory: [2 pairs of inputs]{32 bytes with the first pair's signs and shifts in the low 4 bits
// and the second pair's in the high ones, 32 bytes of the first pair's values, 32 of the second's}, then the exponents
// of the columns' scales. In each 32, byte 2 i is for element i of the first 8 columns' pairs, byte 2 i + 1 for that of
// the next 8.
class StoredBlock {
   public:
    static constexpr int64_t kColumns = kPanel<V8>, kVector = 2 * kColumns;
    static constexpr int64_t kValueBytes = FixedRows::kBlock / 4 * 3 * kVector;
    static constexpr int64_t kBytes = kValueBytes + kColumns;

    explicit StoredBlock(const char* block) : block_(block) {
        alignas(16) static constexpr int8_t kFactors[16] = {1, 2, 4, 8, 16, 32, 0, 0, -1, -2, -4, -8, -16, -32, 0, 0};
        factors_ = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kFactors)));
    }

    // Puts the weights of column c into a block of zeros.
    static void put(const FixedWeights& weights, int64_t c, char* block) {
        block[kValueBytes + c] = static_cast<char>(weights.exponent);
        for (int64_t i = 0; i < FixedRows::kBlock; i++) {
            const int size = std::abs(weights.values[i]);
            int shift = 0;
            while (size >> shift > 255) shift++;
            const int code = (weights.values[i] < 0 ? 8 : 0) | shift;
            const int64_t second = i / 2 % 2, place = c % 8 * 4 + i % 2 * 2 + c / 8;
            char* quads = block + i / 4 * 3 * kVector;
            quads[place] = static_cast<char>(quads[place] | code << (second ? 4 : 0));
            quads[(1 + second) * kVector + place] = static_cast<char>(size >> shift);
        }
    }

    // The weights of inputs 2 k and 2 k + 1 for columns 8 v to 8 v + 7.
    __m256i pairs(int64_t k, int v) const {
        const __m256i codes = load(k / 2 * 3), bytes = load(k / 2 * 3 + 1 + k % 2);
        const __m256i code = _mm256_and_si256(k % 2 ? _mm256_srli_epi16(codes, 4) : codes, _mm256_set1_epi8(15));
        const __m256i factor = _mm256_shuffle_epi8(factors_, code), even = _mm256_set1_epi16(255);
        return _mm256_maddubs_epi16(v ? _mm256_andnot_si256(even, bytes) : _mm256_and_si256(bytes, even), factor);
    }

    V8 scales(int v) const {
        int64_t eight;
        std::memcpy(&eight, block_ + kValueBytes + 8 * v, 8);
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(eight)), 23))};
    }

   private:
    __m256i load(int64_t vector) const {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block_ + vector * kVector));
    }

    const char* block_;
    __m256i factors_;
};

// A StoredBlock whose `pairs` and `scales` are already computed.
class OpenBlock {
   public:
    explicit OpenBlock(const StoredBlock& stored) : scales_{stored.scales(0), stored.scales(1)} {
        for (int64_t quads = 0; quads < FixedRows::kBlock / 4; quads++) {
            unroll<2>([&](auto half) OCTAVO_INLINED {
                const int64_t k = 2 * quads + half;
                unroll<2>([&](auto v) OCTAVO_INLINED { pairs_[k][v] = stored.pairs(k, v); });
            });
        }
    }

    __m256i pairs(int64_t k, int v) const { return pairs_[k][v]; }

    V8 scales(int v) const { return scales_[v]; }

   private:
    __m256i pairs_[FixedRows::kBlock / 2][2];
    V8 scales_[2];
};

struct FixedDots {
    using V = V8;
    using Inputs = FixedRows;
    using Task = NothingHeld;
    static constexpr int kRows = 6;
    static constexpr int64_t kBlockBytes = StoredBlock::kBytes, kPanelBytes = 0;

    static void pack(const Linear& linear, const WeightRows& weights, int64_t p, char* panel) {
        const int64_t inputs = linear.inputs;
        for (int64_t c = 0; c < kPanel<V>; c++) {
            const int64_t row = weight_row<V>(linear, p, c);
            for (int64_t first = 0; row >= 0 && first < inputs; first += FixedRows::kBlock) {
                const bf16* values = weights.row<bf16>(row, inputs) + first;
                StoredBlock::put(FixedWeights(values, std::min(FixedRows::kBlock, inputs - first)), c,
                                 panel + first / FixedRows::kBlock * kBlockBytes);
            }
        }
    }

    // Computes rows [first, last) times panel p. The tiles of all rows process a block before the next one: a block is
    // opened once, and stays in L1.
    template <class Output>
    static void panel(const Inputs& inputs, int64_t first, int64_t last, const char* panel, const char* next, int64_t p,
                      const Output& output) {
        const int64_t rows = last - first;
        auto* sums = static_cast<Sums*>(scratch(kSlotTile, rows * sizeof(Sums)));
        std::fill(sums, sums + rows, Sums{V::zero(), V::zero()});
        for (int64_t b = 0; b < inputs.blocks; b++) {
            const StoredBlock stored(panel + b * kBlockBytes);
            // A single tile opens the block in registers, which is faster than storing and loading it, and leaves
            // prefetching to the CPU: SmolLM2's linears take 6.1 ms for a row on a Zen 4 so, and 10.5 otherwise.
            if (rows <= kRows) {
                tile<kRows>(rows, inputs, first, b, stored, NothingAhead{}, sums);
            } else {
                each_tile(inputs, first, last, b, OpenBlock(stored), next + b * kBlockBytes, sums);
            }
        }
        for (int64_t r = 0; r < rows; r++) output.panel(sums[r].of, first + r, p);
    }

   private:
    static constexpr int64_t kQuads = FixedRows::kBlock / 4;

    struct Sums {
        V of[2];
    };

    // Prefetches into L2.
    struct Ahead {
        const char* place;
        int64_t step;
        void operator()(int64_t quads) const { _mm_prefetch(place + quads * step, _MM_HINT_T1); }
    };

    // Computes block b for rows [first, last), in tiles of nearly equal height; each prefetches its share of what is
    // ahead.
    static void each_tile(const Inputs& inputs, int64_t first, int64_t last, int64_t b, const OpenBlock& block,
                          const char* ahead, Sums* sums) {
        const int64_t rows = last - first, tiles = (rows + kRows - 1) / kRows;
        for (int64_t n = 0; n < tiles; n++) {
            const int64_t top = rows * n / tiles, bottom = rows * (n + 1) / tiles;
            const Ahead share = {ahead + kBlockBytes * n / tiles, kBlockBytes / tiles / kQuads};
            tile<kRows>(bottom - top, inputs, first + top, b, block, share, sums + top);
        }
    }

    // Computes `rows` rows, at most R, from row `first` on.
    template <int R, class Block, class Fetch>
    static void tile(int64_t rows, const Inputs& inputs, int64_t first, int64_t b, const Block& block, Fetch ahead,
                     Sums* sums) {
        if (rows == R) return add<R>(inputs, first, b, block, ahead, sums);
        if constexpr (R > 1) tile<R - 1>(rows, inputs, first, b, block, ahead, sums);
    }

    template <int R, class Block, class Fetch>
    __attribute__((noinline)) static void add(const Inputs& inputs, int64_t first, int64_t b, const Block& block,
                                              Fetch ahead, Sums* sums) {
        const int16_t* values = inputs.values + (b * inputs.rows + first) * FixedRows::kBlock;
        const float* scales = inputs.scales + b * inputs.rows + first;
        __m256i dots[R][2];
        unroll<R>([&](auto r) OCTAVO_INLINED { dots[r][0] = dots[r][1] = _mm256_setzero_si256(); });
        for (int64_t quads = 0; quads < kQuads; quads++) {
            ahead(quads);
            unroll<2>([&](auto half) OCTAVO_INLINED {
                const int64_t k = 2 * quads + half;
                const __m256i columns[2] = {block.pairs(k, 0), block.pairs(k, 1)};
                unroll<R>([&](auto r) OCTAVO_INLINED {
                    const __m256i x = all_pairs(values + r * FixedRows::kBlock + 2 * k);
                    add_products(dots[r][0], x, columns[0]);
                    add_products(dots[r][1], x, columns[1]);
                });
            });
        }
        const V of_columns[2] = {block.scales(0), block.scales(1)};
        unroll<R>([&](auto r) OCTAVO_INLINED {
            const V scale = V::all(scales[r]);
            unroll<2>([&](auto v) OCTAVO_INLINED {
                sums[r].of[v] = fma({_mm256_cvtepi32_ps(dots[r][v])}, scale * of_columns[v], sums[r].of[v]);
            });
        });
    }
};

}  // namespace octavo
