// The steps between the projection of q, k and v and attention: head norms, rope, and the KV cache write.
#pragma once

#include <algorithm>
#include <cstring>

#include "../../native/cpp/e4m3.h"
#include "../../native/cpp/pool.h"
#include "../../native/cpp/vec.h"
#include "../../elementwise/rms_norm/rms_norm.h"
#include "../cache_layout.h"

namespace octavo {

// Matches RopeCacheWriteStruct in kernels/kv_cache/write/native.py.
struct RopeCacheWrite {
    const float* head_norm;  // [heads + kv_heads, head_size] or null
    float eps;
    int32_t heads, kv_heads, head_size, block_size;
    int32_t cache_type;  // CacheType
    float k_scale, v_scale;  // of an e4m3 cache: what is stored is divided by them
};

// Rotates the pairs (2i, 2i + 1) of a head: cos_sin[2i] is the cosine, cos_sin[2i + 1] the sine. head_size % 8 == 0.
inline void rotate(float* head, const float* cos_sin, int64_t head_size) {
    for (int64_t i = 0; i < head_size; i += 8) {
        __m256 x = _mm256_loadu_ps(head + i), t = _mm256_loadu_ps(cos_sin + i);
        __m256 crossed = _mm256_mul_ps(_mm256_permute_ps(x, 0xb1), _mm256_movehdup_ps(t));
        _mm256_storeu_ps(head + i, _mm256_fmaddsub_ps(x, _mm256_moveldup_ps(t), crossed));
    }
}

// Writes a token's key and value of a head, from k and v, to place `offset` of a block.
inline void put_token(const RopeCacheWrite&, const CacheLayout<float>& layout, const float* k, const float* v,
                      int64_t offset, float* keys, float* values) {
    for (int64_t i = 0; i < layout.head_size; i++) {
        keys[layout.key(offset, i)] = k[i];
        values[layout.value(offset, i)] = v[i];
    }
}

inline void round(float x, float, bf16& to) { to = to_bf16(x); }
inline void round(float x, float scale, e4m3& to) { to = to_e4m3(x / scale); }

// Rounds some numbers together, which compilers do in vectors, before they go to their places: SmolLM2's prompt of 1,500
// tokens takes 12.4 ms instead of 22.2, rope included.
template <class T>
void put_token(const RopeCacheWrite& shape, const CacheLayout<T>& layout, const float* k, const float* v, int64_t offset,
               T* keys, T* values) {
    constexpr int64_t kTogether = 64;
    T key[kTogether], value[kTogether];
    for (int64_t first = 0; first < layout.head_size; first += kTogether) {
        const int64_t count = std::min(kTogether, layout.head_size - first);
        for (int64_t i = 0; i < count; i++) round(k[first + i], shape.k_scale, key[i]);
        for (int64_t i = 0; i < count; i++) round(v[first + i], shape.v_scale, value[i]);
        T* pair = keys + layout.key(offset, first);
        for (int64_t i = 0; i < count; i += 2, pair += 2 * layout.block_size) std::memcpy(pair, key + i, 2 * sizeof *key);
        T* place = values + layout.value(offset, first);
        for (int64_t i = 0; i < count; i++) place[2 * i] = value[i];
    }
}

// Rotates q in place in qkv[tokens, (heads + 2 kv_heads) * head_size]; writes rotated k, and v, to the cache's slots.
template <class T>
void rope_cache_write(const RopeCacheWrite& shape, float* qkv, int64_t tokens, const float* cos_sin,
                      const int64_t* slots, T* cache) {
    const CacheLayout<T> layout{shape.kv_heads, shape.head_size, shape.block_size};
    const int64_t size = shape.head_size, rotated = shape.heads + shape.kv_heads;
    const int64_t width = (rotated + shape.kv_heads) * size;
    auto token = [&](int64_t t) {
        float* row = qkv + t * width;
        for (int64_t h = 0; h < rotated; h++) {
            float* head = row + h * size;
            if (shape.head_norm) input_row(head, shape.head_norm + h * size, shape.eps, size, head);
            rotate(head, cos_sin + t * size, size);
        }
        const int64_t block = slots[t] / shape.block_size, offset = slots[t] % shape.block_size;
        for (int64_t h = 0; h < shape.kv_heads; h++) {
            const float* k = row + (shape.heads + h) * size;
            const float* v = k + shape.kv_heads * size;
            put_token(shape, layout, k, v, offset, cache + layout.keys(block, h), cache + layout.values(block, h));
        }
    };
    // Few tokens are divided among the threads, too: SmolLM2's 30 layers take 0.17 ms for 8 rows on a Zen 4, not 0.32.
    const int64_t at_once = std::clamp<int64_t>(tokens / (2 * threads()), 1, 8);
    parallel((tokens + at_once - 1) / at_once, [&](int64_t task) {
        for (int64_t t = task * at_once; t < std::min(tokens, (task + 1) * at_once); t++) token(t);
    });
}

}  // namespace octavo
