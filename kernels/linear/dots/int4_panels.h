// 4-bit weights as panels of columns.
#pragma once

#include <cstring>

#include "../panels.h"
#include "quantized.h"

namespace octavo {

// Stores a half for column c.
inline void pack_half(uint16_t half, int64_t c, char* halves) {
    std::memcpy(halves + c * sizeof half, &half, sizeof half);
}

// A panel is [block]{[2 quads of inputs, in low and in high nibbles][column][4], then halves: the columns' scales and
// the columns' minima, or zeros}.
template <class V>
struct Int4Panels {
    static constexpr int64_t kColumns = kPanel<V>;
    static constexpr int64_t kValueBytes = kBlock * kColumns / 2;
    static constexpr int64_t kScaleBytes = kColumns * sizeof(uint16_t);
    static constexpr int64_t kBlockBytes = kValueBytes + 2 * kScaleBytes;
    static constexpr int64_t kPanelBytes = 0;

    static void pack(const Linear& linear, const WeightRows& weights, int64_t p, char* panel) {
        const int64_t inputs = linear.inputs, blocks = num_blocks(inputs);
        for (int64_t c = 0; c < kColumns; c++) {
            const int64_t row = weight_row<V>(linear, p, c);
            if (row < 0) continue;
            const int8_t* values = weights.row<int8_t>(row, inputs);
            for (int64_t i = 0; i < inputs; i++) {
                char& both = panel[i / kBlock * kBlockBytes + i % kBlock / 8 * 4 * kColumns + c * 4 + i % 4];
                both = static_cast<char>(both | values[i] << (i % 8 < 4 ? 0 : 4));
            }
            for (int64_t b = 0; b < blocks; b++) {
                char* scales = panel + b * kBlockBytes + kValueBytes;
                pack_half(static_cast<const uint16_t*>(weights.scales)[row * blocks + b], c, scales);
                pack_half(weights.minima[row * blocks + b], c, scales + kScaleBytes);
            }
        }
    }
};

}  // namespace octavo
