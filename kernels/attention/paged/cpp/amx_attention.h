// Attention by AMX tiles over a cache of bf16, or of e4m3 that is widened a segment at a time: 16 query heads x 32
// numbers of a head by 16 positions' keys, and 16 query heads x 16 positions by 16 numbers of their values.
//
// All scores of a segment are computed before its weights: a query has one maximum and one sum a segment, and its values
// add up in tile registers. The order of every sum is fixed: scores add up in steps of 32 numbers, weights and values in
// steps of 16 positions counted from the segment's start. A weight of a position that a query does not see is 0, and
// changes no bit. So results depend on what those of tile.h depend on, and on no more.
#pragma once

#include <atomic>
#include <cstring>

#include "../../../native/cpp/amx.h"
#include "../../../native/cpp/unroll.h"
#include "../../../native/cpp/vec16_bf16.h"
#include "tile.h"

namespace octavo {

// Registers 0 to 3 hold sums, 4 queries, 5 keys (pairs of numbers of 16 positions), 6 weights of 16 positions and 7
// values (8 pairs of positions). rows: query heads, of which a tile has at most 16. A decode has few, and would spend
// more time on the others than on its own.
inline TileShapes attention_tiles(int64_t rows) {
    const uint8_t own = static_cast<uint8_t>(std::min<int64_t>(rows, 16));
    return {1, 0, {}, {64, 64, 64, 64, 64, 64, 32, 64}, {own, own, own, own, own, 16, own, 8}};
}

template <class Element>
class AmxAttention : public TileAttention<V16, bf16, bf16, Element> {
    using Base = TileAttention<V16, bf16, bf16, Element>;
    using Base::W, Base::kIsWidened;
    using Base::begin_, Base::block_keys, Base::cap, Base::end_, Base::extra_, Base::first_position_,
        Base::group_, Base::how_, Base::key_stride_, Base::layout_, Base::part_, Base::queries_,
        Base::rows_, Base::step_, Base::vectors_of, Base::widen_keys, Base::widen_values;

public:
    using Otherwise = Base;

    static bool fits(const AttentionStep& step) { return step.head_size % kNumbers == 0; }

    AmxAttention(const AttentionStep& step, const Element* cache, const Scores& scores, const Item& item,
                 int64_t kv_head)
        : Base(step, cache, scores, item, kv_head, num_copied(step) / 2 + kRows * kLine) {
        scores_ = extra_ + num_copied(step) / 2;
    }

    // Like TileAttention's.
    const Running& compute(const float* q, int64_t stride, int64_t first_segment, int64_t end_segment) {
        const TilesInUse tiles(attention_tiles(rows_));
        return Base::template compute<kSegment>(q, stride, first_segment, end_segment,
                                                [&](int64_t base, int64_t count) { segment(base, count); });
    }

private:
    static constexpr int64_t kRows = 16, kPositions = 16, kNumbers = 32, kGroups = kSegment / kPositions;
    // Groups whose scores are in registers together.
    static constexpr int64_t kTogether = 4;
    // Scores of a row, apart by no multiple of 4 KiB.
    static constexpr int64_t kLine = kSegment + 16;

    // Numbers of keys and values that are copied: see find.
    static int64_t num_copied(const AttentionStep& step) {
        return (kIsWidened || step.block_size < kPositions ? 2 * kSegment : kPositions) * step.head_size;
    }

    // Adds positions [base, base + count), which are a segment or its beginning.
    void segment(int64_t base, int64_t count) {
        const int64_t from = std::max<int64_t>(0, begin_ - base) / kPositions, to = vectors_of(count);
        find(base, count, from);
        for (int64_t r = 0; r < rows_; r += kRows) {
            // The compiler does not know that tile instructions read memory.
            std::atomic_signal_fence(std::memory_order_seq_cst);
            for (int64_t v = from; v < to; v += kTogether) score(r, v, std::min(kTogether, to - v), to);
            for (int64_t i = r; i < std::min(r + kRows, rows_); i++) weigh(i, base, count, from);
            std::atomic_signal_fence(std::memory_order_seq_cst);
            for (int64_t first = 0; first < step_.head_size; first += 4 * W) add_values(r, first, from, to);
        }
    }

    // Finds the keys and values of each 16 positions from group `from` on. Blocks of 8 positions are copied in twos. The
    // last values are copied with zeros behind them: what lies there may be NaN, and 0 times NaN is not 0.
    void find(int64_t base, int64_t count, int64_t from) {
        if constexpr (kIsWidened) {
            widen_segment(base, count, from);
        } else {
            const int64_t size = step_.head_size;
            const bool in_twos = step_.block_size < kPositions;
            key_stride_ = std::max(kPositions, int64_t{step_.block_size}) * 2;
            bf16* copy = reinterpret_cast<bf16*>(extra_);
            for (int64_t v = from; v < vectors_of(count); v++) {
                const int64_t position = base + v * kPositions, held = std::min(kPositions, count - v * kPositions);
                const int64_t offset = position & (step_.block_size - 1);
                keys_[v] = block_keys(position) + layout_.key(offset, 0);
                values_[v] = block_keys(position) + layout_.part() + layout_.value(offset, 0);
                if (in_twos) {
                    copy_keys(position, held, copy);
                    keys_[v] = copy;
                    copy += kPositions * size;
                }
                if (in_twos || held < kPositions) {
                    copy_values(position, held, copy);
                    values_[v] = copy;
                    copy += kPositions * size;
                }
            }
        }
    }

    // Widens the keys and values of each 16 positions from group `from` on, and puts zeros behind the last values.
    void widen_segment(int64_t base, int64_t count, int64_t from) {
        const int64_t size = step_.head_size, tokens = std::min<int64_t>(step_.block_size, kPositions);
        key_stride_ = 2 * kPositions;
        bf16* copy = reinterpret_cast<bf16*>(extra_);
        for (int64_t v = from; v < vectors_of(count); v++, copy += 2 * kPositions * size) {
            const int64_t position = base + v * kPositions, held = std::min(kPositions, count - v * kPositions);
            bf16 *keys = copy, *values = copy + kPositions * size;
            keys_[v] = keys;
            values_[v] = values;
            for (int64_t i = 0; i < held; i += tokens) {
                widen_keys(position + i, tokens, keys + 2 * i, key_stride_);
                widen_values(position + i, tokens, values + i * size);
                prefetch_block(std::min(position + i + kTogether * kPositions, end_ - 1), tokens);
            }
            for (int64_t t = held; t < kPositions; t++) {
                for (int64_t i = 0; i < size; i++) values[t / 2 * 2 * size + 2 * i + t % 2] = 0;
            }
        }
    }

    // Prefetches keys and values of `tokens` positions within a block; from larger blocks, what lies around them.
    // Inlined, for g++ 12 drops calls of a function that does no more than this.
    OCTAVO_INLINED void prefetch_block(int64_t position, int64_t tokens) const {
        const char* place = reinterpret_cast<const char*>(block_keys(position));
        const int64_t bytes = std::min<int64_t>(tokens, step_.block_size) * 2 * step_.head_size;
        for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(place + i, kIntoL2);
    }

    // Copies keys as a block of 16 positions holds them, from blocks of 8.
    void copy_keys(int64_t position, int64_t held, bf16* to) const {
        const int64_t width = 2 * step_.block_size;
        for (int64_t i = 0; i < held; i += step_.block_size, to += width) {
            const bf16* from = block_keys(position + i);
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
            const bf16* values = block_keys(position + i) + layout_.part() + layout_.value(offset, 0);
            std::memcpy(to, values, 2 * size * sizeof(bf16));
            for (int64_t second = 1; i + 1 == held && second < 2 * size; second += 2) to[second] = 0;
        }
    }

    // Computes the scores of 16 rows for `groups` groups from group v on. The first rows prefetch the next groups' keys
    // and the values of these, which are needed next.
    void score(int64_t r, int64_t v, int64_t groups, int64_t to) {
        const int64_t size = step_.head_size;
        for (int64_t i = v; r == 0 && i < v + groups; i++) {
            if (i + kTogether < to) prefetch<_MM_HINT_T0>(keys_[i + kTogether], kPositions * size);
            prefetch<_MM_HINT_T1>(values_[i], kPositions * size);
        }
        zero_sums();
        for (int64_t i = 0; i < size; i += kNumbers) {
            _tile_loadd(4, queries_ + r * size + i, size * 2);
            auto keys = [&](int64_t group) { return keys_[v + group] + i / 2 * key_stride_; };
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
        float* scores = scores_ + v * W;
        constexpr int64_t kStride = kLine * sizeof(float);
        _tile_stored(0, scores, kStride);
        if (groups > 1) _tile_stored(1, scores + W, kStride);
        if (groups > 2) _tile_stored(2, scores + 2 * W, kStride);
        if (groups > 3) _tile_stored(3, scores + 3 * W, kStride);
    }

    // The scores of row r, and its weights, which take their place.
    float* scores(int64_t r) { return scores_ + r % kRows * kLine; }
    bf16* weights(int64_t r) { return reinterpret_cast<bf16*>(scores(r)); }

    // Turns row r's scores from group `from` on into weights.
    void weigh(int64_t r, int64_t base, int64_t count, int64_t from) {
        const int64_t position = first_position_ + r / group_;
        const int64_t end = std::min(count, position + 1 - base);
        const int64_t begin = std::max<int64_t>(0, step_.first_key(position) - base);
        const int64_t to = vectors_of(count);
        float* scores = this->scores(r);
        if (begin >= end) {  // part_ is clear
            std::fill(weights(r) + from * W, weights(r) + to * W, bf16{0});
            return;
        }
        if (how_.soft_cap > 0) cap(scores + from * W, to - from);
        std::fill(scores + from * W, scores + begin, kNothing);
        std::fill(scores + end, scores + to * W, kNothing);
        V16 most[4] = {V16::all(kNothing), V16::all(kNothing), V16::all(kNothing), V16::all(kNothing)};
        V16 total[4] = {};
        each_group(from, to, [&](int64_t v, auto i) OCTAVO_INLINED {
            most[i] = max(most[i], V16::load(scores + v * W));
        });
        const float maximum = largest(max(max(most[0], most[1]), max(most[2], most[3])));
        each_group(from, to, [&](int64_t v, auto i) OCTAVO_INLINED {
            total[i] = total[i] + store_as_bf16(weight(V16::load(scores + v * W) - V16::all(maximum)), weights(r) + v * W);
        });
        part_.maxima[r] = maximum;
        part_.sums[r] = sum(add_by_eights(V8::zero(), (total[0] + total[1]) + (total[2] + total[3])));
    }

    // Calls f(v, constant v % 4) for the groups [from, to).
    template <class F>
    static OCTAVO_INLINED void each_group(int64_t from, int64_t to, F&& f) {
        for (int64_t v = from / 4 * 4; v < to; v += 4) {
            if (v >= from && v + 4 <= to) {
                unroll<4>([&](auto i) OCTAVO_INLINED { f(v + i, i); });
            } else {
                unroll<4>([&](auto i) OCTAVO_INLINED {
                    if (v + i >= from && v + i < to) f(v + i, i);
                });
            }
        }
    }

    // Adds up the weighted values of 16 rows, numbers `first` to first + 63.
    void add_values(int64_t r, int64_t first, int64_t from, int64_t to) {
        const int64_t size = step_.head_size, columns = std::min<int64_t>(4, (size - first) / W);  // an even number
        constexpr int64_t kWeights = kLine * sizeof(float);
        zero_sums();
        for (int64_t v = from; v < to; v++) {
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
        float* sums = part_.values + r * size + first;
        _tile_stored(0, sums, size * 4);
        _tile_stored(1, sums + W, size * 4);
        if (columns > 2) {
            _tile_stored(2, sums + 2 * W, size * 4);
            _tile_stored(3, sums + 3 * W, size * 4);
        }
    }

    static void zero_sums() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }

    template <_mm_hint kHint>
    static void prefetch(const bf16* place, int64_t count) {
        for (int64_t i = 0; i < count; i += 64 / sizeof(bf16)) _mm_prefetch(place + i, kHint);
    }

    float* scores_;  // of 16 rows, kLine apart
    const bf16 *keys_[kGroups], *values_[kGroups];
};

}  // namespace octavo
