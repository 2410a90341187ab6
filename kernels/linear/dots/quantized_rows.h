// Inputs of quantized linears: rows rounded to 8-bit integers, with a scale for each block.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../../native/cpp/pool.h"
#include "../../elementwise/rms_norm/rms_norm.h"
#include "../panels.h"

namespace octavo {

// Inputs that share a scale, in rows and in weights. With one scale for whole rows, SmolLM2's perplexity is several
// times that of a scale for each 32 inputs: see docs/quantization.md.
constexpr int64_t kBlock = 32;

inline int64_t num_blocks(int64_t inputs) { return (inputs + kBlock - 1) / kBlock; }

// x[r][b * kBlock + i] is about scale(r, b) * value(r, b)[i]; zeros fill the last block. kGroup rows lie together, block by
// block, so that a tile of them reads one stretch of memory; V: the vectors that round them.
template <class T, class V, int64_t kGroup>
struct QuantizedRows {
    using Value = T;
    static constexpr int64_t kBlock = octavo::kBlock, kTogether = kGroup;

    int64_t blocks;
    int64_t apart;    // rows of a group: less than kGroup if there are less than half as many
    Value* values;    // [groups, blocks, apart, kBlock], -127 to 127
    float* scales;    // [groups, blocks, apart]; 0 for rows beyond the last
    float* offsets;   // [groups, blocks, apart]: a scale times the sum of its values
    int32_t* starts;  // [groups, blocks, apart]: -128 times that sum, the start of sums of products with weights + 128

    // The place of row r's block 0 in these arrays; the next blocks are `apart` rows further.
    int64_t place(int64_t r) const { return r / kGroup * blocks * apart + r % kGroup; }

    // Rounds x[rows, inputs], after the norm if the linear has one.
    static QuantizedRows of(const Linear& linear, const float* x, int64_t rows);
};

inline __m256i load_bits(const float* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }

inline int32_t largest(__m256i v) {
    __m128i a = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    a = _mm_max_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}

inline int32_t sum(__m256i v) {
    __m128i a = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}

inline void store_values(__m256i values, int16_t* place) {
    __m128i low = _mm256_castsi256_si128(values), high = _mm256_extracti128_si256(values, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(place), _mm_packs_epi32(low, high));
}

inline void store_values(__m256i values, int8_t* place) {
    __m128i low = _mm256_castsi256_si128(values), high = _mm256_extracti128_si256(values, 1);
    __m128i words = _mm_packs_epi32(low, high);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(place), _mm_packs_epi16(words, words));
}

// The bits of a block's largest magnitude. Bits of magnitudes have the order of the magnitudes, with NaN above infinity.
// V8: its vectors.
inline int32_t largest_magnitude(V8, const float* x) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    for (int i = 0; i < kBlock; i += 8) most = _mm256_max_epi32(most, _mm256_and_si256(load_bits(x + i), magnitude));
    return largest(most);
}

// Rounds the products of a block and a factor, ties to even, and returns the sum of the results.
template <class Value>
int32_t round_block(const float* x, V8 factor, Value* values) {
    __m256i sums = _mm256_setzero_si256();
    for (int i = 0; i < kBlock; i += 8) {
        const __m256i rounded = _mm256_cvtps_epi32((V8::load(x + i) * factor).x);
        sums = _mm256_add_epi32(sums, rounded);
        store_values(rounded, values + i);
    }
    return sum(sums);
}

// Rounds a block to -127 to 127 times its scale; the largest number becomes 127 or -127. A block with an infinity or NaN
// has the scale NaN, so that every output becomes NaN; a block whose numbers are all below 2^-100 has the scale 0.
template <class V, class Value>
void quantize_block(const float* x, Value* values, float& scale, float& offset, int32_t& start) {
    const int32_t bits = largest_magnitude(V::zero(), x);
    float range;
    std::memcpy(&range, &bits, 4);
    const bool finite = bits < 0x7f800000;
    if (!finite || range < 0x1p-100f) {
        scale = offset = finite ? 0.0f : NAN;
        start = 0;
        std::fill(values, values + kBlock, Value{0});
        return;
    }
    scale = range / 127.0f;
    const int32_t total = round_block(x, V::all(127.0f / range), values);
    offset = scale * static_cast<float>(total);
    start = -128 * total;
}

template <class T, class V, int64_t kGroup>
QuantizedRows<T, V, kGroup> QuantizedRows<T, V, kGroup>::of(const Linear& linear, const float* x, int64_t rows) {
    const int64_t inputs = linear.inputs, blocks = num_blocks(inputs), width = blocks * kBlock;
    const int64_t apart = 2 * rows < kGroup ? rows : kGroup, held = (rows + apart - 1) / apart * apart;
    const int64_t value_bytes = held * width * sizeof(Value), scale_bytes = held * blocks * sizeof(float);
    char* memory = static_cast<char*>(scratch(kSlotRows, value_bytes + 3 * scale_bytes));
    const QuantizedRows result = {blocks, apart, reinterpret_cast<Value*>(memory),
                                  reinterpret_cast<float*>(memory + value_bytes),
                                  reinterpret_cast<float*>(memory + value_bytes + scale_bytes),
                                  reinterpret_cast<int32_t*>(memory + value_bytes + 2 * scale_bytes)};
    const int64_t rows_per_task = std::max<int64_t>(1, 8192 / inputs);
    parallel((rows + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
        float* row = static_cast<float*>(scratch(kSlotTile, width * sizeof(float)));
        std::fill(row + inputs, row + width, 0.0f);
        for (int64_t r = task * rows_per_task; r < std::min(rows, (task + 1) * rows_per_task); r++) {
            input_row(x + r * inputs, linear.norm, linear.eps, inputs, row);
            int64_t place = result.place(r);
            for (int64_t b = 0; b < blocks; b++, place += apart) {
                quantize_block<V>(row + b * kBlock, result.values + place * kBlock, result.scales[place],
                                  result.offsets[place], result.starts[place]);
            }
        }
    });
    for (int64_t r = rows; r < held; r++) {
        for (int64_t b = 0; b < blocks; b++) result.scales[result.place(r) + b * apart] = 0.0f;
    }
    return result;
}

}  // namespace octavo
