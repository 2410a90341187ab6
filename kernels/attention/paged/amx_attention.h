// Attention over a bf16 cache by AMX tiles: 16 query heads x 32 numbers of a head by 16 positions' keys, and 16 query
// heads x 16 positions by 16 numbers of their values.
//
// The order of every sum is fixed: scores add up in steps of 32 numbers, values in steps of 16 positions counted from
// the sequence's start. So results depend on what those of attention.h depend on, and on no more.
#pragma once

#include <atomic>
#include <cstring>

#include "../../native/cpp/amx.h"
#include "../../native/cpp/vec16.h"
#include "../../linear/dots/dots_bf16.h"
#include "attention.h"

namespace octavo {

// Registers 0 to 3 hold sums, 4 queries, 5 keys (pairs of numbers of 16 positions), 6 weights of 16 positions and 7
// values (8 pairs of positions). rows: query heads, of which a tile has at most 16. A decode has few, and would spend
// more time on the others than on its own.
inline TileShapes attention_tiles(int64_t rows) {
    const uint8_t own = static_cast<uint8_t>(std::min<int64_t>(rows, 16));
    return {1, 0, {}, {64, 64, 64, 64, 64, 64, 32, 64}, {own, own, own, own, own, 16, own, 8}};
}

class AmxAttention : public TileAttention<V16, bf16, bf16> {
    using Base = TileAttention<V16, bf16, bf16>;

public:
    using Otherwise = Base;

    static bool fits(const AttentionStep& step) { return step.head_size % kNumbers == 0; }

    AmxAttention(const AttentionStep& step, const bf16* cache, const Scores& scores, const Item& item, int64_t kv_head)
        : Base(step, cache, scores, item, kv_head, kChunk * step.head_size) {}

    // Like TileAttention's.
    const Running& compute(const float* q, int64_t stride, int64_t first_segment, int64_t end_segment) {
        const TilesInUse tiles(attention_tiles(rows_));
        return Base::compute(q, stride, first_segment, end_segment,
                             [&](int64_t base, int64_t count) { chunk(base, count); });
    }

private:
    static constexpr int64_t kRows = 16, kPositions = 16, kNumbers = 32;

    // Adds positions [base, base + count).
    void chunk(int64_t base, int64_t count) {
        find(base, count);
        // The compiler does not know that tile instructions read memory.
        std::atomic_signal_fence(std::memory_order_seq_cst);
        for (int64_t r = 0; r < rows_; r += kRows) score(r, vectors_of(count));
        for (int64_t r = 0; r < rows_; r++) weigh(r, base, count);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        for (int64_t r = 0; r < rows_; r += kRows) add_values(r, vectors_of(count));
    }

    // Finds the keys and values of each 16 positions of the chunk, and of the next chunk's keys. Blocks of 8 positions
    // are copied in twos. The last values are copied with zeros behind them: what lies there may be NaN, and 0 times
    // NaN is not 0.
    void find(int64_t base, int64_t count) {
        Base::find(base, count);
        const int64_t size = step_.head_size;
        key_stride_ = std::max(kPositions, int64_t{step_.block_size}) * 2;
        bf16* copy = reinterpret_cast<bf16*>(extra_);
        for (int64_t v = 0; v < vectors_of(count); v++, copy += 2 * kPositions * size) {
            const int64_t position = base + v * kPositions, held = std::min(kPositions, count - v * kPositions);
            if (step_.block_size < kPositions) {
                copy_keys(position, held, copy);
                keys_[v] = copy;
            }
            if (step_.block_size < kPositions || held < kPositions) {
                copy_values(position, held, copy + kPositions * size);
                values_[v] = copy + kPositions * size;
            }
        }
    }

    // Copies keys as a block of 16 positions holds them, from blocks of 8.
    void copy_keys(int64_t position, int64_t held, bf16* to) const {
        const int64_t width = 2 * step_.block_size;
        for (int64_t i = 0; i < held; i += step_.block_size, to += width) {
            const bf16* from = cache_ + layout_.keys(table_[(position + i) >> block_shift_], kv_head_);
            for (int64_t pair = 0; pair < step_.head_size / 2; pair++) {
                std::memcpy(to + pair * 2 * kPositions, from + pair * width, width * sizeof(bf16));
            }
        }
    }

    // Copies the values of the first `held` of 16 positions, and zeros for the others.
    void copy_values(int64_t position, int64_t held, bf16* to) const {
        const int64_t size = step_.head_size;
        std::fill(to, to + kPositions * size, bf16{0});
        for (int64_t i = 0; i < held; i += 2, to += 2 * size) {
            const int64_t offset = (position + i) & (step_.block_size - 1);
            const int64_t block = table_[(position + i) >> block_shift_];
            std::memcpy(to, cache_ + layout_.values(block, kv_head_) + layout_.value(offset, 0),
                        2 * size * sizeof(bf16));
            for (int64_t second = 1; i + 1 == held && second < 2 * size; second += 2) to[second] = 0;
        }
    }

    // Computes the scores of 16 rows, and prefetches the values of the same positions, which are needed next.
    void score(int64_t r, int64_t groups) {
        const int64_t size = step_.head_size;
        for (int64_t v = 0; r == 0 && v < groups; v++) prefetch(values_[v], kPositions * size);
        zero_sums();
        for (int64_t i = 0; i < size; i += kNumbers) {
            _tile_loadd(4, queries_ + r * size + i, size * 2);
            auto keys = [&](int64_t v) { return keys_[v] + i / 2 * key_stride_; };
            _tile_loadd(5, keys(0), key_stride_ * 2);
            _tile_dpbf16ps(0, 4, 5);
            if (groups > 1) {
                _tile_loadd(5, keys(1), key_stride_ * 2);
                _tile_dpbf16ps(1, 4, 5);
            }
            if (groups > 2) {
                _tile_loadd(5, keys(2), key_stride_ * 2);
                _tile_dpbf16ps(2, 4, 5);
            }
            if (groups > 3) {
                _tile_loadd(5, keys(3), key_stride_ * 2);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        float* scores = scores_ + r * kChunk;
        constexpr int64_t kStride = kChunk * sizeof(float);
        _tile_stored(0, scores, kStride);
        _tile_stored(1, scores + W, kStride);
        _tile_stored(2, scores + 2 * W, kStride);
        _tile_stored(3, scores + 3 * W, kStride);
    }

    // Adds the weighted values of 16 rows, and prefetches the keys of the next chunk.
    void add_values(int64_t r, int64_t groups) {
        const int64_t size = step_.head_size;
        for (int64_t v = 0; r == 0 && v < groups; v++) {
            prefetch(reinterpret_cast<const bf16*>(next_keys_[v]), kPositions * size);
        }
        constexpr int64_t kWeights = kChunk * sizeof(float);
        for (int64_t first = 0; first < size; first += 4 * W) {
            float* sums = part_.values + r * size + first;
            const int64_t columns = std::min<int64_t>(4, (size - first) / W);  // an even number
            _tile_loadd(0, sums, size * 4);
            _tile_loadd(1, sums + W, size * 4);
            if (columns > 2) {
                _tile_loadd(2, sums + 2 * W, size * 4);
                _tile_loadd(3, sums + 3 * W, size * 4);
            }
            for (int64_t v = 0; v < groups; v++) {
                const bf16* values = values_[v] + 2 * first;
                _tile_loadd(6, weights(r) + v * kPositions, kWeights);
                _tile_loadd(7, values, size * 4);
                _tile_dpbf16ps(0, 6, 7);
                _tile_loadd(7, values + 2 * W, size * 4);
                _tile_dpbf16ps(1, 6, 7);
                if (columns > 2) {
                    _tile_loadd(7, values + 4 * W, size * 4);
                    _tile_dpbf16ps(2, 6, 7);
                    _tile_loadd(7, values + 6 * W, size * 4);
                    _tile_dpbf16ps(3, 6, 7);
                }
            }
            _tile_stored(0, sums, size * 4);
            _tile_stored(1, sums + W, size * 4);
            if (columns > 2) {
                _tile_stored(2, sums + 2 * W, size * 4);
                _tile_stored(3, sums + 3 * W, size * 4);
            }
        }
    }

    static void zero_sums() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }

    static void prefetch(const bf16* place, int64_t count) {
        for (int64_t i = 0; i < count; i += 64 / sizeof(bf16)) _mm_prefetch(place + i, _MM_HINT_T0);
    }

    int64_t key_stride_;  // numbers between pairs of a key
};

}  // namespace octavo
