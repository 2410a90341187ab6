// Token embeddings, as float32.
#pragma once

#include <algorithm>
#include <cstring>

#include "../native/pool.h"
#include "../native/vec.h"

namespace octavo {

inline void widen(const float* from, int64_t size, float* to) { std::memcpy(to, from, size * sizeof(float)); }

inline void widen(const bf16* from, int64_t size, float* to) {
    for (int64_t i = 0; i < size; i++) to[i] = to_float(from[i]);
}

// out[tokens, size] from table[vocabulary, size].
template <class T>
void embedding(const int64_t* ids, int64_t tokens, const T* table, int64_t size, float* out) {
    const int64_t at_once = 16;
    parallel((tokens + at_once - 1) / at_once, [&](int64_t task) {
        for (int64_t t = task * at_once; t < std::min(tokens, (task + 1) * at_once); t++) {
            widen(table + ids[t] * size, size, out + t * size);
        }
    });
}

}  // namespace octavo
