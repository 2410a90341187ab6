// Where the keys and values lie that a tile of attention reads: in cache blocks, or widened beside them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../../kv_cache/cache_layout.h"
#include "../../../native/cpp/e4m3.h"
#include "../../../native/cpp/unroll.h"
#include "../../../native/cpp/vec.h"
#include "step.h"

namespace octavo {

// Positions of a chunk: see tile.h.
constexpr int64_t kChunk = 64;
// Keys and values are prefetched into L2 alone: more lines can be on their way there. 64 rows with contexts of 192 take
// 11.2 ms on a Zen 4, with prefetches into L1 15.4, and with none 13.2.
constexpr _mm_hint kIntoL2 = _MM_HINT_T1;

// A row's keys and values of one KV head. Vector, Number and Element: see TileAttention.
template <class Vector, class Number, class Element>
class TileBlocks {
protected:
    using V = Vector;
    using T = Number;
    using Stored = Element;
    static constexpr int W = V::W;
    static constexpr bool kIsWidened = !std::is_same_v<T, Stored>;

    TileBlocks(const AttentionStep& step, const Stored* cache, int64_t row, int64_t kv_head)
        : step_(step), cache_(cache), layout_{step.kv_heads, step.head_size, step.block_size},
          table_(step.block_tables + row * step.table_stride), kv_head_(kv_head),
          block_shift_(__builtin_ctz(step.block_size)),
          key_stride_((kIsWidened ? std::min<int64_t>(step.block_size, kChunk) : step.block_size) * layout_.kPair) {}

    // Finds the addresses of keys and values of each W positions of a chunk, [base, base + count), and of what is needed
    // next. end: that of the context. memory: for those of a chunk, if they are widened.
    void find(int64_t base, int64_t count, int64_t end, T* memory) {
        if constexpr (kIsWidened) {
            widen_chunk(base, count, end, memory);
        } else {
            for (int64_t v = 0; v * W < count; v++) {
                const int64_t position = base + W * v, offset = position & (step_.block_size - 1);
                keys_[v] = block_keys(position) + layout_.key(offset, 0);
                values_[v] = block_keys(position) + layout_.part() + layout_.value(offset, 0);
                next_values_[v] = reinterpret_cast<const char*>(values_[v]);
                next_keys_[v] = reinterpret_cast<const char*>(block_keys(std::min(position + kChunk, end - 1)));
            }
        }
    }

    // Widens a chunk's keys and values, each block's (or its part in the chunk) into one of its own layout.
    void widen_chunk(int64_t base, int64_t count, int64_t end, T* keys) {
        const int64_t size = step_.head_size, tokens = key_stride_ / layout_.kPair;
        T* values = keys + kChunk * size;
        for (int64_t i = 0; i < count; i += tokens, keys += tokens * size, values += tokens * size) {
            widen_keys(base + i, tokens, keys, key_stride_);
            widen_values(base + i, tokens, values);
            for (int64_t t = 0; t < tokens; t += W) {
                keys_[(i + t) / W] = keys + t * layout_.kPair;
                values_[(i + t) / W] = values + t * size;
                const int64_t next = std::min(base + i + t + kChunk, end - 1) & -int64_t{W};
                next_values_[(i + t) / W] = share(next);
            }
        }
    }

    // Where a part of a block begins that is as large as W positions' keys and values. The parts make up the block.
    const char* share(int64_t position) const {
        const int64_t offset = position & (step_.block_size - 1);
        return reinterpret_cast<const char*>(block_keys(position) + offset * 2 * step_.head_size);
    }

    // Widens the keys of `tokens` positions within a block; pairs go `stride` numbers apart.
    void widen_keys(int64_t position, int64_t tokens, T* to, int64_t stride) const {
        const int64_t offset = position & (step_.block_size - 1), pairs = step_.head_size / layout_.kPair;
        const int64_t own = step_.block_size * layout_.kPair;
        const Stored* from = block_keys(position) + layout_.key(offset, 0);
        if (stride == own && tokens == step_.block_size) return widen(V{}, from, pairs * own, to);
        for (int64_t i = 0; i < pairs; i++) widen(V{}, from + i * own, tokens * layout_.kPair, to + i * stride);
    }

    // Widens the values of `tokens` positions within a block.
    void widen_values(int64_t position, int64_t tokens, T* to) const {
        const int64_t offset = position & (step_.block_size - 1);
        const Stored* from = block_keys(position) + layout_.part() + layout_.value(offset, 0);
        widen(V{}, from, tokens * step_.head_size, to);
    }

    const Stored* block_keys(int64_t position) const {
        return cache_ + layout_.keys(table_[position >> block_shift_], kv_head_);
    }

    const AttentionStep& step_;
    const Stored* cache_;
    const CacheLayout<Stored> layout_;
    const int32_t* table_;
    const int64_t kv_head_;
    const int block_shift_;
    int64_t key_stride_;  // numbers between pairs of a key, or between its numbers
    // Where the keys and values of each W positions of a chunk lie.
    const T *keys_[kChunk / W], *values_[kChunk / W];
    // Scores are computed while next_values_ are prefetched: this chunk's values. The values are added while next_keys_ are
    // prefetched: the next chunk's keys. If keys and values are widened, next_values_ are both of the next chunk, and
    // next_keys_ are not set.
    const char *next_values_[kChunk / W], *next_keys_[kChunk / W];
};

}  // namespace octavo
