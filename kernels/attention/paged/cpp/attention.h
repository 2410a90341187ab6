// Attention of a step: its items are computed as tiles on all threads, then contexts that were split are put together.
#pragma once

#include <algorithm>

#include "../../../native/cpp/pool.h"
#include "step.h"
#include "tile.h"

namespace octavo {

// Computes out[tokens, heads * head_size] from q, whose tokens are `stride` floats apart, by tiles of type Tile.
template <class Tile>
void attention(const AttentionStep& step, const float* q, int64_t stride, const typename Tile::Stored* cache,
               const Scores& scores, float* out) {
    if (!Tile::fits(step)) return attention<typename Tile::Otherwise>(step, q, stride, cache, scores, out);
    using V = typename Tile::V;
    const int64_t group = step.heads / step.kv_heads, size = step.head_size, width = step.heads * size;
    const int64_t partial_size = group * (size + 2);
    auto* partials = static_cast<float*>(
        scratch(kSlotPartials, step.num_partials * step.kv_heads * partial_size * sizeof(float)));
    // The sums of a query's heads that read this KV head, over a segment.
    auto partial = [&](int64_t index, int64_t head) {
        float* start = partials + (index * step.kv_heads + head) * partial_size;
        return Running{start, start + group, start + 2 * group};
    };
    auto* sharers = reinterpret_cast<const Sharer*>(step.sharers);
    auto* items = reinterpret_cast<const Item*>(step.items);
    const int64_t tasks = step.num_items * step.kv_heads;
    // Prefetches a task's queries, or where their results go, in an array of `apart` floats a token. Only of a task that
    // computes its queries whole.
    auto prefetch = [&](const float* array, int64_t apart, int64_t task) OCTAVO_INLINED {
        const Item& item = items[task / step.kv_heads];
        const int64_t token = step.query_starts[item.row] + item.first_query, own = group * size;
        for (int64_t i = 0; item.partial == Item::kComplete && i < item.num_queries; i++) {
            const float* place = array + (token + i) * apart + task % step.kv_heads * own;
            for (int64_t n = 0; n < own; n += 16) _mm_prefetch(reinterpret_cast<const char*>(place + n), _MM_HINT_T1);
        }
    };
    parallel(tasks, [&](int64_t task) {
        const Item& item = items[task / step.kv_heads];
        const int64_t head = task % step.kv_heads;
        Tile tile(step, cache, scores, item, head);
        if (task + 1 < tasks) prefetch(q, stride, task + 1);
        prefetch(out, width, task);
        const Running& result = tile.compute(q, stride, item.first_segment, item.end_segment);
        if (item.partial == Item::kComplete) return tile.write(out, width);
        for (int64_t i = 0; i < item.num_queries; i++) {
            const bool is_shared = item.partial == Item::kShared;
            const Running kept = partial(is_shared ? sharers[item.first_query + i].partial : item.partial + i, head);
            std::copy_n(result.maxima + i * group, group, kept.maxima);
            std::copy_n(result.sums + i * group, group, kept.sums);
            std::copy_n(result.values + i * group * size, group * size, kept.values);
        }
    });
    parallel(step.num_splits * step.kv_heads, [&](int64_t task) {
        const Split& split = reinterpret_cast<const Split*>(step.splits)[task / step.kv_heads];
        const int64_t head = task % step.kv_heads;
        for (int64_t i = 0; i < split.num_queries; i++) {
            Running whole = partial(split.first_partial + i, head);
            for (int64_t s = 1; s < split.num_segments; s++) {
                whole.template fold<V>(partial(split.first_partial + s * split.num_queries + i, head), group, size);
            }
            for (int64_t h = 0; h < group; h++) {
                const int64_t query_head = head * group + h;
                float* place = out + (split.token + i) * width + query_head * size;
                Tile::normalized(whole, h, size, scores, query_head, place);
            }
        }
    });
}

}  // namespace octavo
