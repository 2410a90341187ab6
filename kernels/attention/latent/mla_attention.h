// MLA that reads cache blocks in place. All heads of a query read the same entries; an entry's first numbers are also
// its value.
//
// Each head reduces entries in order, in chunks of 64 positions counted from the sequence's start, by vectors of 8 on
// every path. So its result depends only on the query and its context: not on the batch, the chunk of the prompt, the
// block size, the other heads or the number of threads.
#pragma once

#include <algorithm>
#include <cmath>

#include "../../native/cpp/pool.h"
#include "../../native/cpp/vec.h"
#include "../paged/cpp/attention.h"

namespace octavo {

// Matches MlaStepStruct in kernels/attention/latent/native.py; the arrays are those of one step.
struct MlaStep {
    const int32_t* query_starts;
    const int32_t* context_lens;
    const int32_t* block_tables;
    int64_t table_stride, num_rows;
    int32_t heads, latent_size, rope_size;  // sizes are multiples of 8
    int32_t block_size;
    int32_t cache_type;

    int64_t entry_size() const { return latent_size + rope_size; }
};

// Heads per tile: with two vectors of entries that is 8 sums, enough to hide the latency of an addition.
constexpr int kMlaTile = 4;
// Heads per task: they share the cache entries in L2. A step of few tokens has smaller tasks, to occupy all threads.
constexpr int64_t kMlaHeads = 16;

inline V8 load_entry(const float* p) { return V8::load(p); }
inline V8 load_entry(const bf16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}

// Some heads of one query.
template <class T>
class MlaQuery {
public:
    // table: the block table of the query's row. position: the query's position, the last one that it sees.
    MlaQuery(const MlaStep& step, const T* cache, const int32_t* table, int64_t position, int64_t heads)
        : step_(step), cache_(cache), table_(table), end_(position + 1), heads_(heads), size_(step.entry_size()),
          latent_(step.latent_size) {
        queries_ = static_cast<float*>(scratch(kSlotTile, heads * (size_ + latent_ + kChunk + 2) * sizeof(float)));
        values_ = queries_ + heads * size_;
        scores_ = values_ + heads * latent_;
        maxima_ = scores_ + heads * kChunk;
        sums_ = maxima_ + heads;
    }

    // Computes out[heads][latent_size] from q[heads][entry_size].
    void compute(const float* q, float scale, float* out) {
        const V8 factor = V8::all(scale * kLog2E);  // weights are powers of 2
        for (int64_t i = 0; i < heads_ * size_; i += 8) (V8::load(q + i) * factor).store(queries_ + i);
        std::fill(values_, values_ + heads_ * latent_, 0.0f);
        std::fill(maxima_, maxima_ + heads_, kNothing);
        std::fill(sums_, sums_ + heads_, 0.0f);
        for (int64_t base = 0; base < end_; base += kChunk) chunk(base, std::min(kChunk, end_ - base));
        for (int64_t h = 0; h < heads_; h++) {
            const V8 total = V8::all(sums_[h]);
            for (int64_t i = h * latent_; i < (h + 1) * latent_; i += 8) (V8::load(values_ + i) / total).store(out + i);
        }
    }

private:
    // Adds positions [base, base + count).
    void chunk(int64_t base, int64_t count) {
        for (int64_t p = 0; p < count; p++) {
            const int64_t block = table_[(base + p) / step_.block_size], offset = (base + p) % step_.block_size;
            entries_[p] = cache_ + (block * step_.block_size + offset) * size_;
        }
        tiles([&](auto tile, int64_t h) { score<tile()>(h, count); });
        for (int64_t h = 0; h < heads_; h++) weigh(h, count);
        tiles([&](auto tile, int64_t h) { add_values<tile()>(h, count); });
    }

    // Calls f(number of heads, first head) for each tile of heads.
    template <class F>
    void tiles(F&& f) {
        int64_t h = 0;
        for (; h + kMlaTile <= heads_; h += kMlaTile) f(std::integral_constant<int, kMlaTile>{}, h);
        for (; h < heads_; h++) f(std::integral_constant<int, 1>{}, h);
    }

    template <int R>
    void score(int64_t h, int64_t count) {
        const float* queries = queries_ + h * size_;
        for (int64_t p = 0; p < count; p += 2) {
            const T *one = entries_[p], *other = entries_[std::min(p + 1, count - 1)];
            V8 acc[R][2];
            for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = V8::zero();
            for (int64_t i = 0; i < size_; i += 8) {
                const V8 a = load_entry(one + i), b = load_entry(other + i);
                for (int r = 0; r < R; r++) {
                    const V8 query = V8::load(queries + r * size_ + i);
                    acc[r][0] = fma(query, a, acc[r][0]);
                    acc[r][1] = fma(query, b, acc[r][1]);
                }
            }
            for (int r = 0; r < R; r++) {
                float* scores = scores_ + (h + r) * kChunk + p;
                scores[0] = sum(acc[r][0]);
                if (p + 1 < count) scores[1] = sum(acc[r][1]);
            }
        }
    }

    // Turns scores into weights; rescales the head's sums to its new maximum.
    void weigh(int64_t h, int64_t count) {
        float* scores = scores_ + h * kChunk;
        const int64_t padded = (count + 7) / 8 * 8;
        std::fill(scores + count, scores + padded, kNothing);
        V8 most = V8::load(scores);
        for (int64_t i = 8; i < padded; i += 8) most = max(most, V8::load(scores + i));
        const float old = maxima_[h], maximum = std::max(old, largest(most));
        V8 total = V8::zero();
        for (int64_t i = 0; i < padded; i += 8) {
            const V8 weights = exp2(V8::load(scores + i) - V8::all(maximum));
            weights.store(scores + i);
            total = total + weights;
        }
        const V8 shrink = exp2(V8::all(old - maximum));
        sums_[h] = std::fma(sums_[h], first(shrink), sum(total));
        maxima_[h] = maximum;
        if (old == maximum) return;
        float* values = values_ + h * latent_;
        for (int64_t i = 0; i < latent_; i += 8) (V8::load(values + i) * shrink).store(values + i);
    }

    template <int R>
    void add_values(int64_t h, int64_t count) {
        const float* weights = scores_ + h * kChunk;
        for (int64_t i = 0; i < latent_; i += 16) {
            const int64_t j = std::min(i + 8, latent_ - 8);  // equals i if one vector is left
            float* values = values_ + h * latent_;
            V8 acc[R][2];
            for (int r = 0; r < R; r++) {
                acc[r][0] = V8::load(values + r * latent_ + i);
                acc[r][1] = V8::load(values + r * latent_ + j);
            }
            for (int64_t p = 0; p < count; p++) {
                const V8 a = load_entry(entries_[p] + i), b = load_entry(entries_[p] + j);
                for (int r = 0; r < R; r++) {
                    const V8 weight = V8::all(weights[r * kChunk + p]);
                    acc[r][0] = fma(weight, a, acc[r][0]);
                    acc[r][1] = fma(weight, b, acc[r][1]);
                }
            }
            for (int r = 0; r < R; r++) {
                acc[r][0].store(values + r * latent_ + i);
                acc[r][1].store(values + r * latent_ + j);
            }
        }
    }

    const MlaStep& step_;
    const T* cache_;
    const int32_t* table_;
    const int64_t end_, heads_, size_, latent_;
    float *queries_, *values_, *scores_, *maxima_, *sums_;
    const T* entries_[kChunk];
};

// Computes out[tokens][heads][latent_size] from q[tokens][heads][entry_size].
template <class T>
void mla_attention(const MlaStep& step, const float* q, const T* cache, float scale, float* out) {
    const int64_t tokens = step.query_starts[step.num_rows];
    const bool has_many = tokens * ((step.heads + kMlaHeads - 1) / kMlaHeads) >= threads();
    const int64_t heads_per_task = has_many ? kMlaHeads : kMlaTile;
    const int64_t groups = (step.heads + heads_per_task - 1) / heads_per_task;
    parallel(tokens * groups, [&](int64_t task) {
        const int64_t token = task / groups, head = task % groups * heads_per_task;
        const int32_t* starts = step.query_starts;
        const int64_t row = std::upper_bound(starts, starts + step.num_rows, token) - starts - 1;
        const int64_t position = step.context_lens[row] - (starts[row + 1] - token);
        const int64_t heads = std::min<int64_t>(heads_per_task, step.heads - head);
        MlaQuery<T> query(step, cache, step.block_tables + row * step.table_stride, position, heads);
        const int64_t first = token * step.heads + head;
        query.compute(q + first * step.entry_size(), scale, out + first * step.latent_size);
    });
}

}  // namespace octavo
