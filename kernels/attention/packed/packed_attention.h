// Attention without a mask over packed sequences: each token sees all tokens of its own sequence.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../../native/cpp/pool.h"
#include "../../native/cpp/vec.h"

namespace octavo {

// Queries of a task, and keys of a chunk. A chunk's keys are transposed for each task: with 128 queries this takes an
// eighth of the time of the products.
constexpr int64_t kPackedQueries = 128, kPackedKeys = 64;

// c[R][columns] = a[R][depth] b[depth][columns], or, if it adds, added to c. Columns are a multiple of V's width. Each
// number's sum has one order, whatever R is.
template <class V, int R>
inline void product(const float* a, int64_t a_stride, int64_t depth, const float* b, int64_t columns, float* c,
                    bool adds) {
    const auto some = [&](auto vectors, int64_t first) {
        constexpr int C = vectors();
        V sums[R][C];
        for (int r = 0; r < R; r++) {
            for (int v = 0; v < C; v++) {
                sums[r][v] = adds ? V::load(c + r * columns + first + v * V::W) : V::zero();
            }
        }
        for (int64_t d = 0; d < depth; d++) {
            V row[C];
            for (int v = 0; v < C; v++) row[v] = V::load(b + d * columns + first + v * V::W);
            for (int r = 0; r < R; r++) {
                const V factor = V::all(a[r * a_stride + d]);
                for (int v = 0; v < C; v++) sums[r][v] = fma(factor, row[v], sums[r][v]);
            }
        }
        for (int r = 0; r < R; r++) {
            for (int v = 0; v < C; v++) sums[r][v].store(c + r * columns + first + v * V::W);
        }
    };
    // With 6 rows, 24 of AVX-512's 32 registers are sums, or 12 of AVX2's 16. 5 vectors are 3 and 2, not 4 and 1.
    constexpr int64_t kMost = V::W == 16 ? 4 : 2;
    for (int64_t first = 0; first < columns;) {
        const int64_t left = (columns - first) / V::W, groups = (left + kMost - 1) / kMost;
        const int64_t vectors = (left + groups - 1) / groups;
        if (vectors == 1) some(std::integral_constant<int, 1>{}, first);
        if (vectors == 2) some(std::integral_constant<int, 2>{}, first);
        if constexpr (kMost == 4) {
            if (vectors == 3) some(std::integral_constant<int, 3>{}, first);
            if (vectors == 4) some(std::integral_constant<int, 4>{}, first);
        }
        first += vectors * V::W;
    }
}

template <class V>
void products(const float* a, int64_t a_stride, int64_t rows, int64_t depth, const float* b, int64_t columns, float* c,
              bool adds) {
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6) product<V, 6>(a + r * a_stride, a_stride, depth, b, columns, c + r * columns, adds);
    for (; r < rows; r++) product<V, 1>(a + r * a_stride, a_stride, depth, b, columns, c + r * columns, adds);
}

// One head of up to kPackedQueries queries of a sequence.
template <class V>
class PackedTile {
public:
    // memory: kept from tile to tile, since a small window takes no longer than filling it with zeros.
    PackedTile(int64_t head_size, std::vector<float>& memory)
        : size_(head_size), padded_((head_size + V::W - 1) / V::W * V::W) {
        const int64_t keys = size_ * kPackedKeys, values = kPackedKeys * padded_;
        const int64_t scores = kPackedQueries * kPackedKeys, sums = kPackedQueries * padded_;
        memory.resize(keys + values + scores + sums + 2 * kPackedQueries);
        keys_ = memory.data();
        values_ = keys_ + keys;
        scores_ = values_ + values;
        sums_ = scores_ + scores;
        maxima_ = sums_ + sums;
        totals_ = maxima_ + kPackedQueries;
        for (int64_t j = 0; j < kPackedKeys; j++) {
            std::fill(values_ + j * padded_ + size_, values_ + (j + 1) * padded_, 0.0f);
        }
    }

    // q: of the first query; k, v: of the sequence's first token. out_stride: between tokens.
    void compute(const float* q, const float* k, const float* v, int64_t stride, int64_t queries, int64_t length,
                 float scale, float* out, int64_t out_stride) {
        std::fill(sums_, sums_ + queries * padded_, 0.0f);
        std::fill(maxima_, maxima_ + queries, -std::numeric_limits<float>::max());
        std::fill(totals_, totals_ + queries, 0.0f);
        for (int64_t base = 0; base < length; base += kPackedKeys) {
            const int64_t count = std::min(kPackedKeys, length - base);
            pack(k + base * stride, v + base * stride, stride, count);
            products<V>(q, stride, queries, size_, keys_, kPackedKeys, scores_, false);
            for (int64_t r = 0; r < queries; r++) weigh(r, count, scale * kLog2E);
            products<V>(scores_, kPackedKeys, queries, count, values_, padded_, sums_, true);
        }
        for (int64_t r = 0; r < queries; r++) {
            for (int64_t i = 0; i < size_; i++) out[r * out_stride + i] = sums_[r * padded_ + i] / totals_[r];
        }
    }

private:
    void pack(const float* k, const float* v, int64_t stride, int64_t count) {
        for (int64_t j = 0; j < count; j++) {
            for (int64_t i = 0; i < size_; i++) keys_[i * kPackedKeys + j] = k[j * stride + i];
            std::copy(v + j * stride, v + j * stride + size_, values_ + j * padded_);
        }
    }

    // Turns a query's scores into weights; rescales its sums to the new maximum.
    void weigh(int64_t r, int64_t count, float scale) {
        float* scores = scores_ + r * kPackedKeys;
        const int64_t padded = (count + 7) / 8 * 8;
        for (int64_t i = 0; i < count; i++) scores[i] *= scale;
        std::fill(scores + count, scores + padded, -std::numeric_limits<float>::infinity());
        V8 most = V8::load(scores);
        for (int64_t i = 8; i < padded; i += 8) most = max(most, V8::load(scores + i));
        const float old = maxima_[r], maximum = std::max(old, largest(most));
        V8 total = V8::zero();
        for (int64_t i = 0; i < padded; i += 8) {
            const V8 weights = exp2(V8::load(scores + i) - V8::all(maximum));
            weights.store(scores + i);
            total = total + weights;
        }
        const V8 shrink = exp2(V8::all(old - maximum));
        totals_[r] = std::fma(totals_[r], first(shrink), sum(total));
        maxima_[r] = maximum;
        if (old == maximum) return;
        float* sums = sums_ + r * padded_;
        for (int64_t i = 0; i < padded_; i += 8) (V8::load(sums + i) * shrink).store(sums + i);
    }

    const int64_t size_, padded_;
    float* keys_;    // [size_][kPackedKeys]
    float* values_;  // [kPackedKeys][padded_]; what is beyond size_ stays 0
    float* scores_;  // [kPackedQueries][kPackedKeys]
    float* sums_;    // [kPackedQueries][padded_]
    float *maxima_, *totals_;
};

// Computes out[tokens][heads][head_size] from q, k and v, whose tokens are `stride` numbers apart. Sequence i has the
// tokens starts[i] to starts[i + 1] - 1.
template <class V>
void packed_attention(const int32_t* starts, int64_t sequences, const float* q, const float* k, const float* v,
                      int64_t stride, int64_t heads, int64_t head_size, float scale, float* out) {
    struct Tile {
        int64_t first, query, length;  // tokens: the sequence's first, the tile's first query; the sequence's number
    };
    std::vector<Tile> tiles;
    for (int64_t s = 0; s < sequences; s++) {
        for (int64_t query = starts[s]; query < starts[s + 1]; query += kPackedQueries) {
            tiles.push_back({starts[s], query, starts[s + 1] - starts[s]});
        }
    }
    // Tasks of one head follow each other.
    parallel(static_cast<int64_t>(tiles.size()) * heads, [&](int64_t task) {
        const Tile& tile = tiles[task % tiles.size()];
        const int64_t column = task / static_cast<int64_t>(tiles.size()) * head_size;
        const int64_t queries = std::min(kPackedQueries, tile.first + tile.length - tile.query);
        static thread_local std::vector<float> memory;
        PackedTile<V>(head_size, memory)
            .compute(q + tile.query * stride + column, k + tile.first * stride + column,
                     v + tile.first * stride + column, stride, queries, tile.length, scale,
                     out + tile.query * heads * head_size + column, heads * head_size);
    });
}

}  // namespace octavo
