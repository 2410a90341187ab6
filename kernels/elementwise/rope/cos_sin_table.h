// Cosines and sines of a step's positions, for rope_cache_write.
#pragma once

#include <algorithm>
#include <cmath>

#include "../../native/cpp/pool.h"

namespace octavo {

// Matches CosSinTableStruct in kernels/elementwise/rope/__init__.py.
struct CosSinTable {
    const float* frequencies;  // [rotated], radians a token
    float magnitude;
    int32_t rotated, pairs;  // pairs after the first `rotated` ones stay as they are
};

// Fills cos_sin[tokens][pairs] with (cosine, sine). Angles are float32, as in PyTorch.
inline void cos_sin_table(const CosSinTable& rope, const int64_t* positions, int64_t tokens, float* cos_sin) {
    const int64_t at_once = 16;
    parallel((tokens + at_once - 1) / at_once, [&](int64_t task) {
        for (int64_t t = task * at_once; t < std::min(tokens, (task + 1) * at_once); t++) {
            const float position = static_cast<float>(positions[t]);
            float* row = cos_sin + 2 * t * rope.pairs;
            for (int64_t i = 0; i < rope.rotated; i++) {
                const float angle = position * rope.frequencies[i];
                row[2 * i] = rope.magnitude * std::cos(angle);
                row[2 * i + 1] = rope.magnitude * std::sin(angle);
            }
            for (int64_t i = rope.rotated; i < rope.pairs; i++) {
                row[2 * i] = 1.0f;
                row[2 * i + 1] = 0.0f;
            }
        }
    });
}

}  // namespace octavo
