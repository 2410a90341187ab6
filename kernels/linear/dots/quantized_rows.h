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

// x[r][b * kBlock + i] is about scales[b][r] * values[b][r][i]; zeros fill the last block. The rows of a block are
// adjacent, so that a tile finds them at constant distances.
template <class T>
struct QuantizedRows {
    using Value = T;
    static constexpr int64_t kBlock = octavo::kBlock;

    int64_t blocks, rows;
    Value* values;    // [blocks, rows, kBlock], -127 to 127
    float* scales;    // [blocks, rows]
    float* offsets;   // [blocks, rows]: a scale times the sum of its values
    int32_t* starts;  // [blocks, rows]: -128 times that sum, the start of sums of products with weights + 128

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

// Rounds a block to -127 to 127 times its scale, ties to even; the largest number becomes 127 or -127. A block with an
// infinity or NaN has the scale NaN, so that every output becomes NaN; a block whose numbers are all below 2^-100 has
// the scale 0.
template <class Value>
void quantize_block(const float* x, Value* values, float& scale, float& offset, int32_t& start) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    // The bits of magnitudes have the order of the magnitudes, with NaN above infinity.
    for (int i = 0; i < kBlock; i += 8) most = _mm256_max_epi32(most, _mm256_and_si256(load_bits(x + i), magnitude));
    const int32_t bits = largest(most);
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
    const V8 inverse = V8::all(127.0f / range);
    __m256i sums = _mm256_setzero_si256();
    for (int i = 0; i < kBlock; i += 8) {
        const __m256i rounded = _mm256_cvtps_epi32((V8::load(x + i) * inverse).x);
        sums = _mm256_add_epi32(sums, rounded);
        store_values(rounded, values + i);
    }
    const int32_t total = sum(sums);
    offset = scale * static_cast<float>(total);
    start = -128 * total;
}

template <class Value>
QuantizedRows<Value> QuantizedRows<Value>::of(const Linear& linear, const float* x, int64_t rows) {
    const int64_t inputs = linear.inputs, blocks = num_blocks(inputs), width = blocks * kBlock;
    const int64_t value_bytes = rows * width * sizeof(Value), scale_bytes = rows * blocks * sizeof(float);
    char* memory = static_cast<char*>(scratch(kSlotRows, value_bytes + 3 * scale_bytes));
    const QuantizedRows<Value> result = {blocks, rows, reinterpret_cast<Value*>(memory),
                                         reinterpret_cast<float*>(memory + value_bytes),
                                         reinterpret_cast<float*>(memory + value_bytes + scale_bytes),
                                         reinterpret_cast<int32_t*>(memory + value_bytes + 2 * scale_bytes)};
    const int64_t rows_per_task = std::max<int64_t>(1, 8192 / inputs);
    parallel((rows + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
        float* row = static_cast<float*>(scratch(kSlotTile, width * sizeof(float)));
        std::fill(row + inputs, row + width, 0.0f);
        for (int64_t r = task * rows_per_task; r < std::min(rows, (task + 1) * rows_per_task); r++) {
            input_row(x + r * inputs, linear.norm, linear.eps, inputs, row);
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t place = b * rows + r;
                quantize_block(row + b * kBlock, result.values + place * kBlock, result.scales[place],
                               result.offsets[place], result.starts[place]);
            }
        }
    });
    return result;
}

}  // namespace octavo
