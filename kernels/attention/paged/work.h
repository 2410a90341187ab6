// The work of a step's attention: the list of items, made once for all layers.
#pragma once

#include <algorithm>

#include "attention.h"
#include "../../native/cpp/pool.h"

namespace octavo {

// With fewer tiles than this for each thread, contexts are split.
constexpr int64_t kTilesPerThread = 8;

// Fills step.items and step.splits, and counts them, for the first rows, which have `tokens` queries together. A row of
// several queries is cut into tiles of nearly equal height, of at most tile_rows query heads per KV head. The segments
// of a context are computed apart, and their results combined afterwards (a split), for rows of one query, and for all
// rows of one tile in a step that has few tiles, where a tile may be twice as high. The caller provides room for as many
// items as there are queries, rows, and segments in all contexts together, and for one split a row.
inline void plan_attention(AttentionStep& step, int64_t tokens, int64_t tile_rows) {
    struct Planned {
        int64_t cost;
        Item item;
    };
    const int64_t most_queries = std::max<int64_t>(1, tile_rows / (step.heads / step.kv_heads));
    auto first_segment = [&](int64_t position) { return step.first_key(position) / kSegment; };
    auto end_segment = [&](int64_t position) { return (position + kSegment - 1) / kSegment; };
    auto queries_of = [&](int64_t r) { return step.query_starts[r + 1] - step.query_starts[r]; };
    bool is_small = false;
    auto tiles_of = [&](int64_t r) {
        const int64_t most = is_small && step.context_lens[r] > kSegment ? 2 * most_queries : most_queries;
        return (queries_of(r) + most - 1) / most;
    };
    int64_t rows = 0, tiles = 0;
    while (step.query_starts[rows] < tokens) tiles += tiles_of(rows++);
    is_small = tiles * step.kv_heads < kTilesPerThread * threads();
    auto may_split = [&](int64_t r) { return tiles_of(r) == 1 && (is_small || queries_of(r) == 1); };
    int64_t room = tiles;
    for (int64_t r = 0; r < rows; r++) {
        if (may_split(r)) room += step.context_lens[r] / kSegment;
    }
    auto* planned = static_cast<Planned*>(scratch(kSlotRows, room * sizeof(Planned)));
    auto* splits = reinterpret_cast<Split*>(step.splits);
    int64_t num_items = 0, num_splits = 0, num_partials = 0;
    auto add = [&](int64_t position, int64_t row, int64_t query, int64_t queries, int64_t begin, int64_t end,
                   int64_t partial) {
        const int64_t keys = std::min((end - begin) * kSegment, position + queries);
        planned[num_items++] = {queries * keys,
                                {static_cast<int32_t>(row), static_cast<int32_t>(query), static_cast<int32_t>(queries),
                                 static_cast<int32_t>(begin), static_cast<int32_t>(end), static_cast<int32_t>(partial)}};
    };
    for (int64_t r = 0; r < rows; r++) {
        const int64_t queries = queries_of(r), first = step.context_lens[r] - queries, of_row = tiles_of(r);
        for (int64_t i = 0; i < of_row; i++) {
            const int64_t q = queries * i / of_row, count = queries * (i + 1) / of_row - q, position = first + q;
            const int64_t begin = first_segment(position), end = end_segment(position + count);
            if (end - begin == 1 || !may_split(r)) {
                add(position, r, q, count, begin, end, -1);
                continue;
            }
            splits[num_splits++] = {static_cast<int32_t>(r), static_cast<int32_t>(q), static_cast<int32_t>(count),
                                    static_cast<int32_t>(num_partials), static_cast<int32_t>(end - begin)};
            for (int64_t s = begin; s < end; s++, num_partials += count) {
                add(position, r, q, count, s, s + 1, num_partials);
            }
        }
    }
    // Long items first, so that threads end together. The pool gives each thread a run of tasks: each run is sorted so.
    std::stable_sort(planned, planned + num_items, [](const Planned& a, const Planned& b) { return a.cost > b.cost; });
    auto* items = reinterpret_cast<Item*>(step.items);
    for (int64_t t = 0, n = 0; t < threads(); t++) {
        for (int64_t i = t; i < num_items; i += threads()) items[n++] = planned[i].item;
    }
    step.num_items = num_items;
    step.num_splits = num_splits;
    step.num_partials = num_partials;
}

}  // namespace octavo
