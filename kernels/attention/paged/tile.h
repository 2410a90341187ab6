// Attention of a tile: some queries' heads that read one KV head, over some segments of cache blocks, read in place.
//
// A query's keys are reduced in chunks of 64 positions, and chunks in segments of 512; both are counted from the
// sequence's start and always combined in order. A chunk of which a query sees nothing changes no bit of its result. So
// the result depends only on the query and its context: not on the batch, the chunk of the prompt, the block size, the
// number of threads or the width of the vectors. It makes no difference either whether a query computes a segment alone
// or, in one tile, with those of other rows that have the same blocks there.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "../../kv_cache/cache_layout.h"
#include "../../native/cpp/accumulate.h"
#include "../../native/cpp/e4m3.h"
#include "../../native/cpp/pool.h"
#include "../../native/cpp/unroll.h"
#include "../../native/cpp/vec.h"
#include "step.h"

namespace octavo {

constexpr int64_t kChunk = 64;
// Keys and values are prefetched into L2 alone: more lines can be on their way there. 64 rows with contexts of 192 take
// 11.2 ms on a Zen 4, with prefetches into L1 15.4, and with none 13.2.
constexpr _mm_hint kIntoL2 = _MM_HINT_T1;
// Vectors of a tile of R query heads. With 16 floats, 4 vectors are a chunk's scores, and 6 x 4 sums fit into the 32
// registers. With 8 floats and the 3 heads per KV head of many models, 3 x 4 sums would spill (16 registers) and 3 x 2
// would wait for each other.
template <class V, int R>
constexpr int kVectors = V::W == 16 ? 4 : R == 3 ? 3 : kTileVectors<V, R>;

// V: the vector type; its width divides the head size and is at most the block size. A: the type that queries and
// weights are rounded to before they multiply keys and values, as numbers of type T. Element: the type of the cache; if
// it is another one than T, a chunk's keys and values are widened when the chunk begins.
template <class Vector, class A, class Number, class Element = Number>
class TileAttention {
public:
    using V = Vector;
    using T = Number;
    using Stored = Element;
    // Computes what this class cannot.
    using Otherwise = TileAttention<V8, A, T, Stored>;

    static bool fits(const AttentionStep& step) {
        return V::W == 8 || (step.head_size % V::W == 0 && step.block_size >= V::W);
    }

    TileAttention(const AttentionStep& step, const Stored* cache, const Scores& scores, const Item& item,
                  int64_t kv_head)
        : TileAttention(step, cache, scores, item, kv_head, kIsWidened ? kChunk * step.head_size : 0) {
        key_stride_ = (kIsWidened ? std::min<int64_t>(step.block_size, kChunk) : step.block_size) * layout_.kPair;
    }

    // q: this step's queries, `stride` floats a token. Returns the unnormalized result, valid until the next call.
    const Running& compute(const float* q, int64_t stride, int64_t first_segment, int64_t end_segment) {
        return compute<kChunk>(q, stride, first_segment, end_segment,
                               [&](int64_t base, int64_t count) { chunk(base, count); });
    }

    int64_t rows() const { return rows_; }

    void write(float* out, int64_t stride) const {
        for (int64_t r = 0; r < rows_; r++) {
            normalized(whole_, r, step_.head_size, how_, kv_head_ * group_ + r % group_, out + place(r, stride));
        }
    }

    // Row r is of query head `head`.
    static void normalized(const Running& running, int64_t r, int64_t size, const Scores& scores, int64_t head,
                           float* out) {
        const float* values = running.values + r * size;
        const float sum = running.sums[r] / scores.value_scale;
        if (scores.sinks) return with_sink(values, running.maxima[r], sum, size, scores, head, out);
        const V total = V::all(sum);
        for (int64_t i = 0; i < size; i += V::W) (V::load(values + i) / total).store(out + i);
    }

protected:
    static constexpr int W = V::W;
    static constexpr bool kIsWidened = !std::is_same_v<T, Stored>;

    // extra: floats of memory for copies of keys and values, and for a derived class. There is room for a multiple of 16
    // rows.
    TileAttention(const AttentionStep& step, const Stored* cache, const Scores& scores, const Item& item,
                  int64_t kv_head, int64_t extra)
        : step_(step), cache_(cache), how_(scores), layout_{step.kv_heads, step.head_size, step.block_size},
          table_(step.block_tables + item.row * step.table_stride), kv_head_(kv_head),
          group_(step.heads / step.kv_heads), rows_(item.num_queries * group_),
          block_shift_(__builtin_ctz(step.block_size)) {
        if (item.partial == Item::kShared) {
            sharers_ = reinterpret_cast<const Sharer*>(step.sharers) + item.first_query;
            end_ = item.end_segment * kSegment;
            first_position_ = end_ - 1;  // or later: all see the whole segment
            begin_ = 0;
        } else {
            const int64_t queries = step.query_starts[item.row + 1] - step.query_starts[item.row];
            first_token_ = step.query_starts[item.row] + item.first_query;
            first_position_ = step.context_lens[item.row] - queries + item.first_query;
            end_ = first_position_ + item.num_queries;
            begin_ = step.first_key(first_position_);
        }
        const int64_t size = step.head_size, room = (rows_ + 15) / 16 * 16;
        extra_ = static_cast<float*>(scratch(kSlotTile, (extra + room * (3 * size + kChunk + 5)) * 4 + 64));
        float* memory = extra_ + extra;
        queries_ = reinterpret_cast<A*>(memory);
        scores_ = memory + room * size;
        part_ = {scores_ + room * (kChunk + 2 * size), nullptr, scores_ + room * kChunk};
        part_.sums = part_.maxima + room;
        whole_ = {part_.sums + room, part_.sums + 2 * room, part_.values + room * size};
        factors_ = part_.sums + 3 * room;
    }

    // add(base, count): adds positions [base, base + count) to part_, at most kSize of a segment.
    template <int64_t kSize, class Add>
    const Running& compute(const float* q, int64_t stride, int64_t first_segment, int64_t end_segment, Add&& add) {
        load_queries(q, stride);
        const int64_t size = step_.head_size;
        whole_.clear(rows_, size);
        for (int64_t segment = first_segment; segment < end_segment; segment++) {
            part_.clear(rows_, size);
            const int64_t stop = std::min(end_, (segment + 1) * kSegment);
            for (int64_t base = segment * kSegment; base < stop; base += kSize) {
                if (base + kSize > begin_) add(base, std::min(kSize, stop - base));
            }
            whole_.template fold<V>(part_, rows_, size);
        }
        return whole_;
    }

    // The sink comes last, whether a context was split or not.
    static void with_sink(const float* values, float maximum, float sum, int64_t size, const Scores& scores, int64_t head,
                          float* out) {
        const float score = scores.sinks[head] * kLog2E, both = std::max(maximum, score);
        const V old = exp2(V::all(maximum - both)), more = exp2(V::all(score - both)) / V::all(scores.value_scale);
        const V total = fma(V::all(sum), old, more);
        for (int64_t i = 0; i < size; i += W) (V::load(values + i) * old / total).store(out + i);
    }

    static int64_t vectors_of(int64_t count) { return (count + W - 1) / W; }

    // Returns the stored (rounded) value.
    static V store(V v, float* p) {
        v.store(p);
        return v;
    }
    static V store(V v, bf16* p) { return store_rounded(v, p); }

    // Stores 2^x. Returns the stored value.
    static V store_weight(V x, A* p) {
        if constexpr (sizeof(A) == 2) {
            return store_weights(x, p);
        } else {
            return store(exp2(x), p);
        }
    }

    // A row's weights take the place of its scores.
    A* weights(int64_t r) { return reinterpret_cast<A*>(scores_ + r * kChunk); }

    // The offset of row r (one head of one query) in an array of `stride` floats a token.
    int64_t place(int64_t r, int64_t stride) const {
        const int64_t query = r / group_, token = sharers_ ? sharers_[query].token : first_token_ + query;
        return token * stride + (kv_head_ * group_ + r % group_) * step_.head_size;
    }

    void load_queries(const float* q, int64_t stride) {
        const V scale = V::all(how_.scale * how_.unit());
        for (int64_t r = 0; r < rows_; r++) {
            for (int64_t i = 0; i < step_.head_size; i += W) {
                store(V::load(q + place(r, stride) + i) * scale, queries_ + r * step_.head_size + i);
            }
        }
    }

    // Adds positions [base, base + count).
    void chunk(int64_t base, int64_t count) {
        find(base, count);
        for (int64_t r = 0; r < rows_; r += 6) as_constant<6>(std::min<int64_t>(6, rows_ - r), [&](auto rows) {
            score<rows()>(r, count);
        });
        weigh(base, count);
        for (int64_t r = 0; r < rows_; r += 6) as_constant<6>(std::min<int64_t>(6, rows_ - r), [&](auto rows) {
            add_values<rows()>(r, count);
        });
    }

    // Finds the addresses of keys and values of each W positions of the chunk, and of the next chunk's keys.
    void find(int64_t base, int64_t count) {
        if constexpr (kIsWidened) {
            widen_chunk(base, count);
        } else {
            for (int64_t v = 0; v < vectors_of(count); v++) {
                const int64_t position = base + W * v, offset = position & (step_.block_size - 1);
                keys_[v] = block_keys(position) + layout_.key(offset, 0);
                values_[v] = block_keys(position) + layout_.part() + layout_.value(offset, 0);
                next_keys_[v] = reinterpret_cast<const char*>(block_keys(std::min(position + kChunk, end_ - 1)));
            }
        }
    }

    // Widens a chunk's keys and values, each block's (or its part in the chunk) into one of its own layout, and prefetches
    // the next chunk's.
    void widen_chunk(int64_t base, int64_t count) {
        const int64_t size = step_.head_size, tokens = key_stride_ / layout_.kPair;
        T *keys = reinterpret_cast<T*>(extra_), *values = keys + kChunk * size;
        for (int64_t i = 0; i < count; i += tokens, keys += tokens * size, values += tokens * size) {
            widen_keys(base + i, tokens, keys, key_stride_);
            widen_values(base + i, tokens, values);
            prefetch_block(std::min(base + i + kChunk, end_ - 1), tokens);
            for (int64_t t = 0; t < tokens; t += W) {
                keys_[(i + t) / W] = keys + t * layout_.kPair;
                values_[(i + t) / W] = values + t * size;
                next_keys_[(i + t) / W] = reinterpret_cast<const char*>(keys);
            }
        }
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

    // Prefetches keys and values of `tokens` positions within a block; from larger blocks, what lies around them.
    void prefetch_block(int64_t position, int64_t tokens) const {
        const char* place = reinterpret_cast<const char*>(block_keys(position));
        const int64_t bytes = std::min<int64_t>(tokens, step_.block_size) * 2 * step_.head_size;
        for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(place + i, kIntoL2);
    }

    // Computes scores, and prefetches the values of the same positions, which are needed next.
    template <int R>
    void score(int64_t r, int64_t count) {
        constexpr int N = kVectors<V, R>;
        const int64_t vectors = vectors_of(count), size = step_.head_size;
        for (int64_t first = 0; first < vectors; first += N) {
            V acc[R][N];
            const T* b[N];
            const char* ahead[N];
            for (int v = 0; v < N; v++) {
                b[v] = keys_[std::min(first + v, vectors - 1)];
                ahead[v] = reinterpret_cast<const char*>(values_[std::min(first + v, vectors - 1)]);
                for (int i = 0; i < R; i++) acc[i][v] = V::zero();
            }
            // W keys times the query, over D numbers or D / 2 pairs.
            accumulate(acc, queries_ + r * size, size, b, key_stride_, size, [&](int64_t k) {
                if (kIsWidened) return;
                for (const char* place : ahead) _mm_prefetch(place + k * W * 4, kIntoL2);
            });
            for (int v = 0; v < N && first + v < vectors; v++) {
                for (int i = 0; i < R; i++) acc[i][v].store(scores_ + (r + i) * kChunk + (first + v) * W);
            }
        }
    }

    // c tanh(x / 2) = c - 2 c / (1 + e^x), for scores x; e^x of a large x is huge but finite.
    void cap(float* scores, int64_t vectors) const {
        const V limit = V::all(how_.soft_cap * kLog2E), twice = limit + limit;
        for (int64_t v = 0; v < vectors; v++) {
            (limit - twice / (V::all(1.0f) + exp2(V::load(scores + v * W)))).store(scores + v * W);
        }
    }

    // Turns scores into weights; rescales the sums of weights to the rows' new maxima. All maxima come first, so that
    // rows wait for each other's nowhere.
    void weigh(int64_t base, int64_t count) {
        constexpr int64_t kFull = kChunk / W;
        const int64_t vectors = vectors_of(count);
        for (int64_t r = 0; r < rows_; r++) {
            factors_[r] = std::max(part_.maxima[r], vectors == kFull ? maximum<kFull>(r, base, count, vectors)
                                                                     : maximum<0>(r, base, count, vectors));
        }
        for (int64_t r = 0; r < rows_; r += W) {
            const V maxima = V::load(factors_ + r);
            // A row that has seen nothing has sums of 0.
            const V factors = exp2(V::load(part_.maxima + r) - max(maxima, V::all(-kLargest)));
            maxima.store(part_.maxima + r);
            factors.store(factors_ + r);
        }
        for (int64_t r = 0; r < rows_; r++) {
            const float total = vectors == kFull ? weigh_row<kFull>(r, vectors) : weigh_row<0>(r, vectors);
            part_.sums[r] = std::fma(part_.sums[r], factors_[r], total);
        }
    }

    // The largest score of row r, once it is capped and those that the row does not see are kNothing. N: the number of
    // vectors if it is known, or 0.
    template <int N>
    float maximum(int64_t r, int64_t base, int64_t count, int64_t vectors) {
        if constexpr (N) vectors = N;
        const int64_t position = first_position_ + r / group_;
        const int64_t end = std::min(count, position + 1 - base);
        const int64_t begin = std::max<int64_t>(0, step_.first_key(position) - base);
        float* scores = scores_ + r * kChunk;
        if (how_.soft_cap > 0) cap(scores, vectors);
        if (begin > 0 || end < vectors * W) {
            std::fill(scores, scores + std::min(begin, vectors * W), kNothing);
            std::fill(scores + std::max<int64_t>(0, end), scores + vectors * W, kNothing);
        }
        V most = V::load(scores);
        for (int64_t v = 1; v < vectors; v++) most = max(most, V::load(scores + v * W));
        return largest(most);
    }

    // Returns the sum of the weights of row r.
    template <int N>
    float weigh_row(int64_t r, int64_t vectors) {
        if constexpr (N) vectors = N;
        const float* scores = scores_ + r * kChunk;
        const V maximum = V::all(std::max(part_.maxima[r], -kLargest));
        V8 total = V8::zero();
        for (int64_t v = 0; v < vectors; v++) {
            total = add_by_eights(total, store_weight(V::load(scores + v * W) - maximum, weights(r) + v * W));
        }
        return sum(total);
    }

    // Adds weighted values, and prefetches the keys of the next chunk.
    template <int R>
    void add_values(int64_t r, int64_t count) {
        constexpr int N = kVectors<V, R>;
        const int64_t size = step_.head_size, vectors = size / W, tokens = std::min<int64_t>(step_.block_size, 16);
        constexpr int64_t kShare = N * W * 4;  // bytes of keys to prefetch per number, or pair, of N vectors
        for (int64_t first = 0; first < vectors; first += N) {
            V acc[R][N];
            for (int v = 0; v < N; v++) {
                const int64_t column = W * std::min(first + v, vectors - 1);
                for (int i = 0; i < R; i++) {
                    acc[i][v] = V::load(part_.values + (r + i) * size + column) * V::all(factors_[r + i]);
                }
            }
            for (int64_t done = 0; done < count; done += tokens) {
                const T* b[N];
                for (int v = 0; v < N; v++) {
                    b[v] = values_[done / W] + layout_.value(0, W * std::min(first + v, vectors - 1));
                }
                const char* ahead = next_keys_[done / W] + first / N * (kShare * step_.block_size / layout_.kPair);
                accumulate(acc, weights(r) + done, kChunk * sizeof(float) / sizeof(A), b, size * layout_.kPair,
                           std::min(tokens, count - done), [&](int64_t k) {
                               if (kIsWidened) return;
                               for (int64_t i = 0; i < kShare; i += 64) {
                                   _mm_prefetch(ahead + k * kShare + i, kIntoL2);
                               }
                           });
            }
            for (int v = 0; v < N && first + v < vectors; v++) {
                for (int i = 0; i < R; i++) acc[i][v].store(part_.values + (r + i) * size + (first + v) * W);
            }
        }
    }

    const AttentionStep& step_;
    const Stored* cache_;
    const Scores how_;
    const CacheLayout<Stored> layout_;
    const int32_t* table_;
    const int64_t kv_head_, group_, rows_;
    const int block_shift_;
    const Sharer* sharers_ = nullptr;  // or the queries, instead of those from first_token_ on
    int64_t first_token_ = 0, first_position_, begin_, end_;  // begin, end: positions that any query sees
    float* extra_;
    A* queries_;
    float* scores_;
    float* factors_;  // by row: what its sums so far are multiplied by in a chunk, as its maximum has grown
    int64_t key_stride_ = 0;  // numbers between pairs of a key, or between its numbers
    const T *keys_[kChunk / W], *values_[kChunk / W];
    const char* next_keys_[kChunk / W];
    Running part_, whole_;
};

}  // namespace octavo
