// Token embeddings in float32, times a scale.
#pragma once

#include <algorithm>

#include "../../native/cpp/pool.h"
#include "../../native/cpp/vec.h"

namespace octavo {

inline float widened(float value) { return value; }
inline float widened(bf16 value) { return to_float(value); }

// Fills out[tokens, size] from table[vocabulary, size]. A scale of 1 changes no bit.
template <class T>
void embedding(const int64_t* ids, int64_t tokens, const T* table, int64_t size, float scale,
               float* out) {
    const int64_t at_once = 16;
    parallel((tokens + at_once - 1) / at_once, [&](int64_t task) {
        for (int64_t t = task * at_once; t < std::min(tokens, (task + 1) * at_once); t++) {
            const T* from = table + ids[t] * size;
            float* to = out + t * size;
            for (int64_t i = 0; i < size; i++) to[i] = widened(from[i]) * scale;
        }
    });
}

}  // namespace octavo
