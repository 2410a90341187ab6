// The input of attention in one step, the items into which its work is cut, and the sums that an item computes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "../../../native/cpp/vec.h"

namespace octavo {

// Positions of a segment: see tile.h.
constexpr int64_t kSegment = 512;
constexpr float kNothing = -std::numeric_limits<float>::infinity(), kLargest = std::numeric_limits<float>::max();

// Matches AttentionStepStruct in kernels/attention/paged/native.py; the arrays are those of one step.
struct AttentionStep {
    const int32_t* query_starts;
    const int32_t* context_lens;
    const int32_t* block_tables;
    int32_t* items;   // [num_items][6]: see Item
    int32_t* splits;  // [num_splits][4]: see Split
    int32_t* sharers;  // [any][2]: see Sharer
    int64_t table_stride, num_items, num_splits, num_partials;  // a partial: the sums of a query over a segment
    int32_t heads, kv_heads, head_size;
    int32_t block_size;  // a power of 2 from 8 on
    int32_t window;  // positions that a query sees, its own included; 0: all before it
    int32_t attention_chunk;  // positions per chunk, of which a query sees only its own; 0: no chunks
    int32_t cache_type;  // CacheType

    // The first position that the query at `position` sees.
    int64_t first_key(int64_t position) const {
        const int64_t of_window = window ? std::max<int64_t>(0, position - window + 1) : 0;
        return attention_chunk ? std::max(of_window, position / attention_chunk * attention_chunk) : of_window;
    }
};

// How a layer's scores become weights: weight = softmax(capped(scale * q k)), where capped(s) = soft_cap * tanh(s /
// soft_cap), or s if soft_cap is 0. sinks: null, or a score for each head that joins its softmax without a value.
// value_scale: what values are multiplied by.
struct Scores {
    float scale, soft_cap;
    const float* sinks;  // [heads]
    float value_scale;

    // Scores are computed in units that suit weigh(): weights are powers of 2, and a cap reads twice the tanh's argument.
    float unit() const { return soft_cap > 0 ? 2 * kLog2E / soft_cap : kLog2E; }
};

// A piece of work: some queries over some segments of a context.
struct Item {
    static constexpr int32_t kComplete = -1, kShared = -2;

    int32_t row, first_query, num_queries, first_segment, end_segment;
    // The partial of its first query, which those of the others follow. kComplete: the results go to the output. kShared:
    // the queries are step.sharers from first_query on. They are of several rows, which have the same blocks here, `row`
    // among them, and see the whole segment.
    int32_t partial;
};

// A query of a shared item.
struct Sharer {
    int32_t token, partial;
};

// Queries of a row whose segments are computed apart: tokens from `token` on. num_queries partials for each segment.
struct Split {
    int32_t token, num_queries, first_partial, num_segments;
};

// Maxima, sums and weighted values of some query heads, over the keys seen so far.
struct Running {
    float *maxima, *sums, *values;  // [heads], [heads], [heads][head_size]

    void clear(int64_t heads, int64_t size) {
        std::fill(maxima, maxima + heads, kNothing);
        std::fill(sums, sums + heads, 0.0f);
        std::fill(values, values + heads * size, 0.0f);
    }

    // Adds the result of later keys. If one side has no keys, the result is bitwise the other side.
    template <class V>
    void fold(const Running& later, int64_t heads, int64_t size) {
        for (int64_t h = 0; h < heads; h++) {
            const float both = std::max(maxima[h], later.maxima[h]);
            if (both == kNothing) continue;
            const V old = exp2(V::all(maxima[h] - both)), more = exp2(V::all(later.maxima[h] - both));
            float *to = values + h * size, *from = later.values + h * size;
            for (int64_t i = 0; i < size; i += V::W) fma(V::load(from + i), more, V::load(to + i) * old).store(to + i);
            sums[h] = std::fma(later.sums[h], first(more), sums[h] * first(old));
            maxima[h] = both;
        }
    }
};

}  // namespace octavo
