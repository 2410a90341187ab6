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

#include "../../../native/cpp/accumulate.h"
#include "../../../native/cpp/pool.h"
#include "../../../native/cpp/unroll.h"
#include "../../../native/cpp/vec.h"
#include "step.h"
#include "tile_blocks.h"

namespace octavo {

// Positions, at most, whose values are added up at once: they are in one block.
constexpr int64_t kTokens = 16;
// Vectors of a tile of R query heads. With 16 floats, 4 vectors are a chunk's scores, and 6 x 4 sums fit into the 32
// registers. With 8 floats and the 3 heads per KV head of many models, 3 x 4 sums would spill (16 registers) and 3 x 2
// would wait for each other.
template <class V, int R>
constexpr int kVectors = V::W == 16 ? 4 : R == 3 ? 3 : kTileVectors<V, R>;

// V: the vector type; its width divides the head size and is at most the block size. A: the type that queries and
// weights are rounded to before they multiply keys and values, as numbers of type T. Element: the type of the cache; if
// it is another one than T, a chunk's keys and values are widened when the chunk begins.
template <class Vector, class A, class Number, class Element = Number>
class TileAttention : protected TileBlocks<Vector, Number, Element> {
    using Blocks = TileBlocks<Vector, Number, Element>;

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
        : TileAttention(step, cache, scores, item, kv_head, kIsWidened ? kChunk * step.head_size : 0) {}

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
    using Blocks::W, Blocks::kIsWidened;
    using Blocks::find, Blocks::key_stride_, Blocks::keys_, Blocks::kv_head_, Blocks::layout_, Blocks::next_keys_,
        Blocks::next_values_, Blocks::step_, Blocks::values_;

    // extra: floats of memory for copies of keys and values, and for a derived class. There is room for a multiple of 16
    // rows.
    TileAttention(const AttentionStep& step, const Stored* cache, const Scores& scores, const Item& item,
                  int64_t kv_head, int64_t extra)
        : Blocks(step, cache, item.row, kv_head), how_(scores), group_(step.heads / step.kv_heads),
          rows_(item.num_queries * group_) {
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
        extra_ = static_cast<float*>(scratch(kSlotTile, (extra + room * (3 * size + kChunk + 16 + 6)) * 4));
        float* memory = extra_ + extra;
        queries_ = reinterpret_cast<A*>(memory);
        scores_ = memory + room * size;
        most_ = scores_ + room * (kChunk + 2 * size);
        part_ = {most_ + room * 16, nullptr, scores_ + room * kChunk};
        part_.sums = part_.maxima + room;
        whole_ = {part_.sums + room, part_.sums + 2 * room, part_.values + room * size};
        factors_ = part_.sums + 3 * room;
        shifts_ = factors_ + room;
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
            const float* from = q + place(r, stride);
            for (int64_t i = 0; i < step_.head_size; i += W) {
                store(V::load(from + i) * scale, queries_ + r * step_.head_size + i);
            }
        }
    }

    // Adds positions [base, base + count).
    void chunk(int64_t base, int64_t count) {
        find(base, count, end_, reinterpret_cast<T*>(extra_));
        for_rows([&](int64_t r, auto rows, auto fetches) { score<rows(), fetches()>(r, count); });
        weigh(base, count);
        for_rows([&](int64_t r, auto rows, auto fetches) { add_values<rows(), fetches()>(r, count); });
    }

    // Calls f(r, rows, fetches), the last two constants, for each 6 rows. Of 6 rows the first alone prefetch.
    template <class F>
    void for_rows(F&& f) const {
        for (int64_t r = 0; r < rows_; r += 6) {
            as_constant<6>(std::min<int64_t>(6, rows_ - r), [&](auto rows) {
                if (rows() == 6 && r > 0) return f(r, std::integral_constant<int, 6>{}, std::false_type{});
                f(r, rows, std::true_type{});
            });
        }
    }

    // Computes scores, and may prefetch what is needed next.
    template <int R, bool kFetches>
    void score(int64_t r, int64_t count) {
        constexpr int N = kVectors<V, R>;
        const int64_t vectors = vectors_of(count), size = step_.head_size;
        for (int64_t first = 0; first < vectors; first += N) {
            V acc[R][N];
            int64_t place[N];  // of the last vector, if there are fewer than N
            const T* b[N];
            const char* ahead[N];
            unroll<N>([&](auto v) OCTAVO_INLINED {
                place[v] = std::min<int64_t>(first + v, vectors - 1);
                b[v] = keys_[place[v]];
                ahead[v] = next_values_[place[v]];
                unroll<R>([&](auto i) OCTAVO_INLINED { acc[i][v] = V::zero(); });
            });
            // W keys times the query, over D numbers or D / 2 pairs.
            accumulate(acc, queries_ + r * size, size, b, key_stride_, size, [&](int64_t k) {
                if (!kFetches) return;
                for (const char* start : ahead) _mm_prefetch(start + k * W * 4, kIntoL2);
            });
            unroll<R>([&](auto i) OCTAVO_INLINED {
                float* most = most_ + (r + i) * W;
                V largest = first ? V::load(most) : acc[i][0];
                unroll<N>([&](auto v) OCTAVO_INLINED {
                    acc[i][v].store(scores_ + (r + i) * kChunk + place[v] * W);
                    largest = max(largest, acc[i][v]);
                });
                largest.store(most);
            });
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
        const int64_t vectors = vectors_of(count), last = first_position_ + (rows_ - 1) / group_;
        const bool all_seen = count == kChunk && base + kChunk <= first_position_ + 1 && step_.first_key(last) <= base;
        for_eights([&](int64_t r) OCTAVO_INLINED {
            if (all_seen && how_.soft_cap <= 0) return larger_half(V::load(most_ + r * W));
            return vectors == kFull ? maxima<kFull>(r, base, count, vectors) : maxima<0>(r, base, count, vectors);
        }, [&](int64_t r, const V8 (&maxima)[8]) OCTAVO_INLINED {
            max(V8::load(part_.maxima + r), largest_each(maxima)).store(shifts_ + r);
        });
        for (int64_t r = 0; r < rows_; r += W) {
            const V maxima = V::load(shifts_ + r), shifts = max(maxima, V::all(-kLargest));
            // A row that has seen nothing has sums of 0.
            exp2(V::load(part_.maxima + r) - shifts).store(factors_ + r);
            maxima.store(part_.maxima + r);
            shifts.store(shifts_ + r);
        }
        for_eights([&](int64_t r) OCTAVO_INLINED {
            return vectors == kFull ? weigh_row<kFull>(r, vectors) : weigh_row<0>(r, vectors);
        }, [&](int64_t r, const V8 (&totals)[8]) OCTAVO_INLINED {
            fma(V8::load(part_.sums + r), V8::load(factors_ + r), sum_each(totals)).store(part_.sums + r);
        });
    }

    // Calls use(r, {row(r), ..., row(r + 7)}) for each 8 rows.
    template <class Row, class Use>
    OCTAVO_INLINED void for_eights(Row&& row, Use&& use) const {
        for (int64_t r = 0; r < rows_; r += 8) {
            V8 of_row[8];
            for (int64_t i = 0; i < 8; i++) of_row[i] = r + i < rows_ ? row(r + i) : V8::zero();
            use(r, of_row);
        }
    }

    // The largest scores of row r, once they are capped and those that the row does not see are kNothing. N: the number
    // of vectors if it is known, or 0.
    template <int N>
    V8 maxima(int64_t r, int64_t base, int64_t count, int64_t vectors) {
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
        return larger_half(most);
    }

    // Sums of the weights of row r.
    template <int N>
    OCTAVO_INLINED V8 weigh_row(int64_t r, int64_t vectors) {
        if constexpr (N) vectors = N;
        const float* scores = scores_ + r * kChunk;
        const V shift = V::all(shifts_[r]);
        if constexpr (sizeof(A) == 2) {
            V sums[16 / W] = {};
            for (int64_t first = 0; first < vectors; first += 32 / W) {
                V x[32 / W];
                unroll<32 / W>([&](auto i) OCTAVO_INLINED {
                    const int64_t v = first + i;
                    x[i] = N || v < vectors ? V::load(scores + v * W) - shift : V::all(kNothing);
                });
                add_weights(x, weights(r) + first * W, sums);
            }
            return add_halves(sums);
        } else {
            V8 total = V8::zero();
            for (int64_t v = 0; v < vectors; v++) {
                total = add_by_eights(total, store(exp2(V::load(scores + v * W) - shift), weights(r) + v * W));
            }
            return total;
        }
    }

    // Adds weighted values, and may prefetch the keys of the next chunk.
    template <int R, bool kFetches>
    void add_values(int64_t r, int64_t count) {
        constexpr int N = kVectors<V, R>;
        constexpr int64_t kShare = N * W * 4;  // bytes of keys to prefetch per number, or pair, of N vectors
        const int64_t size = step_.head_size, vectors = size / W, tokens = std::min<int64_t>(step_.block_size, kTokens);
        float* sums = part_.values + r * size;
        for (int64_t first = 0; first < vectors; first += N) {
            V acc[R][N];
            int64_t column[N];  // of the last vector, if there are fewer than N
            unroll<N>([&](auto v) OCTAVO_INLINED {
                column[v] = W * std::min<int64_t>(first + v, vectors - 1);
                unroll<R>([&](auto i) OCTAVO_INLINED {
                    acc[i][v] = V::load(sums + i * size + column[v]) * V::all(factors_[r + i]);
                });
            });
            const auto add = [&](int64_t done, auto added) OCTAVO_INLINED {
                const T* b[N];
                unroll<N>([&](auto v) OCTAVO_INLINED { b[v] = values_[done / W] + layout_.value(0, column[v]); });
                const char* ahead =
                    kIsWidened ? nullptr : next_keys_[done / W] + first / N * (kShare * step_.block_size / layout_.kPair);
                accumulate(acc, weights(r) + done, kChunk * sizeof(float) / sizeof(A), b, size * layout_.kPair, added,
                           [&](int64_t k) {
                               if (!kFetches || kIsWidened) return;
                               for (int64_t i = 0; i < kShare; i += 64) _mm_prefetch(ahead + k * kShare + i, kIntoL2);
                           });
            };
            int64_t done = 0;
            if constexpr (R == 6) {  // of prompts
                for (; tokens == kTokens && done + kTokens <= count; done += kTokens) {
                    add(done, std::integral_constant<int64_t, kTokens>{});
                }
            }
            for (; done < count; done += tokens) add(done, std::min(tokens, count - done));
            unroll<R>([&](auto i) OCTAVO_INLINED {
                unroll<N>([&](auto v) OCTAVO_INLINED { acc[i][v].store(sums + i * size + column[v]); });
            });
        }
    }

    const Scores how_;
    const int64_t group_, rows_;
    const Sharer* sharers_ = nullptr;  // or the queries, instead of those from first_token_ on
    int64_t first_token_ = 0, first_position_, begin_, end_;  // begin, end: positions that any query sees
    float* extra_;
    A* queries_;
    float* scores_;
    float* most_;     // [rows][W]: the largest of a row's scores in a chunk, for each lane
    float* shifts_;   // by row: what is subtracted from its scores
    float* factors_;  // by row: what its sums so far are multiplied by in a chunk, as its maximum has grown
    Running part_, whole_;
};

}  // namespace octavo
