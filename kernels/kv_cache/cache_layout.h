// The place of a token's numbers in the native KV cache.
#pragma once

#include <cstdint>

namespace octavo {

enum CacheType : int32_t { kFloat32Cache, kBf16Cache, kE4m3Cache };

// A layer's cache is [block][KV head][keys, values][numbers of a block]. Attention multiplies queries by the keys of 8
// tokens at once, and weights by 8 numbers of a value at once. So in float32 a block's keys are [number][token] and its
// values [token][number]. In bf16 the summed dim is stored in pairs, [pair of numbers][token][2] and
// [pair of tokens][number][2], which halves the work of widening; e4m3 is widened to that.
template <class T>
struct CacheLayout {
    static constexpr int kPair = sizeof(T) <= 2 ? 2 : 1;
    int64_t kv_heads, head_size, block_size;

    int64_t part() const { return head_size * block_size; }
    int64_t keys(int64_t block, int64_t head) const { return (block * kv_heads + head) * 2 * part(); }
    int64_t values(int64_t block, int64_t head) const { return keys(block, head) + part(); }
    // Offsets of number i of a token, from the start of a block's keys or values.
    int64_t key(int64_t token, int64_t i) const {
        return i / kPair * block_size * kPair + token * kPair + i % kPair;
    }
    int64_t value(int64_t token, int64_t i) const {
        return token / kPair * head_size * kPair + i * kPair + token % kPair;
    }
};

}  // namespace octavo
