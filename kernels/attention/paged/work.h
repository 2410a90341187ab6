// The work of a step's attention: the list of items, made once for all layers.
#pragma once

#include <algorithm>

#include "attention.h"
#include "../../native/cpp/pool.h"

namespace octavo {

// Fills step.items and step.splits, and counts them, for the first rows, which have `tokens` queries together. A row of
// several queries is cut into tiles of at most tile_rows query heads per KV head. A row of one query whose context is
// longer than a segment is cut into its segments, whose results are combined afterwards: a split. The caller provides
// room for as many items as there are queries, rows, and segments in all contexts together, and for one split a row.
inline void plan_attention(AttentionStep& step, int64_t tokens, int64_t tile_rows) {
    struct Planned {
        int64_t cost;
        Item item;
    };
    const int64_t queries_per_tile = std::max<int64_t>(1, tile_rows / (step.heads / step.kv_heads));
    auto first_segment = [&](int64_t position) { return step.first_key(position) / kSegment; };
    int64_t rows = 0;
    while (step.query_starts[rows] < tokens) rows++;
    int64_t room = tokens + rows;
    for (int64_t r = 0; r < rows; r++) room += step.context_lens[r] / kSegment;
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
        const int64_t queries = step.query_starts[r + 1] - step.query_starts[r];
        const int64_t first = step.context_lens[r] - queries;
        auto end_segment = [&](int64_t position) { return (position + kSegment - 1) / kSegment; };
        const int64_t begin = first_segment(first), end = end_segment(step.context_lens[r]);
        if (queries == 1 && end - begin > 1) {
            splits[num_splits++] = {static_cast<int32_t>(r), static_cast<int32_t>(num_partials),
                                    static_cast<int32_t>(end - begin)};
            for (int64_t s = begin; s < end; s++) add(first, r, 0, 1, s, s + 1, num_partials++);
            continue;
        }
        for (int64_t q = 0; q < queries; q += queries_per_tile) {
            const int64_t count = std::min(queries_per_tile, queries - q), position = first + q;
            add(position, r, q, count, first_segment(position), end_segment(position + count), -1);
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
