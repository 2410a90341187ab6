// Inputs of linears in block fixed point (dots_fixed.h): rows rounded to 13-bit integers, with a scale for each block.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../../native/cpp/pool.h"
#include "../../../elementwise/rms_norm/rms_norm.h"
#include "../../panels.h"

namespace octavo {

// Stores 8 values, rounded to nearest.
inline void store_rounded(V8 values, int16_t* y) {
    const __m256i whole = _mm256_cvtps_epi32(values.x);
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y), halves);
}

// x[r][b * kBlock + i] is about scales[b][r] * values[b][r][i]; zeros fill the last block. The rows of a block are
// adjacent, so that a tile finds them at constant distances.
struct FixedRows {
    using Value = int16_t;
    static constexpr int64_t kBlock = 64, kTogether = 6;  // a tile
    static constexpr int kLimit = 4095;  // 12 bits and a sign, four more than bf16

    int64_t blocks, rows;
    int16_t* values;  // [blocks, rows, kBlock]
    float* scales;    // [blocks, rows]

    // Rounds x[rows, inputs], after the norm if the linear has one.
    static FixedRows of(const Linear& linear, const float* x, int64_t rows) {
        const int64_t inputs = linear.inputs, blocks = (inputs + kBlock - 1) / kBlock;
        const int64_t value_bytes = blocks * rows * kBlock * sizeof(int16_t);
        char* memory = static_cast<char*>(scratch(kSlotRows, value_bytes + blocks * rows * sizeof(float)));
        const FixedRows result = {blocks, rows, reinterpret_cast<int16_t*>(memory),
                                  reinterpret_cast<float*>(memory + value_bytes)};
        // Few enough that several threads round a batch of 8.
        const int64_t rows_per_task = std::max<int64_t>(1, 2048 / inputs);
        parallel((rows + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
            for (int64_t r = task * rows_per_task; r < std::min(rows, (task + 1) * rows_per_task); r++) {
                result.round(linear, x + r * inputs, r);
            }
        });
        return result;
    }

   private:
    // An infinite or undefined input makes its block's scale, and so every sum of the row, infinite or undefined.
    void round(const Linear& linear, const float* x, int64_t r) const {
        const float* weight = linear.norm;
        const int64_t inputs = linear.inputs;
        const float norm = weight ? inverse_rms(x, inputs, linear.eps) : 1.0f;
        for (int64_t b = 0; b < blocks; b++) {
            alignas(32) float block[kBlock] = {};
            const int64_t first = b * kBlock, count = std::min(kBlock, inputs - first);
            for (int64_t i = 0; i < count; i++) {
                block[i] = weight ? x[first + i] * norm * weight[first + i] : x[first + i];
            }
            V8 most = V8::zero(), nothing = V8::zero();
            for (int64_t i = 0; i < kBlock; i += 8) {
                const V8 value = V8::load(block + i);
                most = max(most, max(value, V8::zero() - value));
                nothing = fma(value, V8::zero(), nothing);
            }
            const float scale = largest(most) / kLimit + sum(nothing);
            const V8 divisor = V8::all(scale == 0.0f ? 1.0f : scale);
            scales[b * rows + r] = scale;
            int16_t* place = values + (b * rows + r) * kBlock;
            for (int64_t i = 0; i < kBlock; i += 8) store_rounded(V8::load(block + i) / divisor, place + i);
        }
    }
};

}  // namespace octavo
