// The work of a step's attention: the list of items, made once for all layers.
#pragma once

#include <algorithm>
#include <cstring>

#include "step.h"
#include "../../../native/cpp/pool.h"

namespace octavo {

// Rows whose contexts begin with the same blocks, as prompts that share a prefix do: decodes compute the segments in
// which they are equal together, so that these are read once.
class SharedSegments {
public:
    // The number of int32 of memory for so many rows.
    static int64_t room(int64_t rows) { return 3 * rows; }

    // may_share(r): row r may compute with others. Its queries must see all positions before them.
    template <class F>
    SharedSegments(const AttentionStep& step, int64_t rows, int32_t* memory, F&& may_share)
        : step_(step), order_(memory), shared_(memory + rows), of_row_(memory + 2 * rows) {
        std::fill(of_row_, of_row_ + rows, 0);
        if (step.window || step.attention_chunk || step.block_size > kSegment) return;
        for (int64_t r = 0; r < rows; r++) {
            if (whole(r) > 0 && may_share(r)) order_[count_++] = static_cast<int32_t>(r);
        }
        // Any order does that puts rows with the same first blocks next to each other.
        std::sort(order_, order_ + count_, [&](int32_t a, int32_t b) {
            const int64_t in_a = whole(a), in_b = whole(b);
            const int difference = std::memcmp(table(a), table(b), std::min(in_a, in_b) * bytes());
            return difference ? difference < 0 : in_a != in_b ? in_a < in_b : a < b;
        });
        for (int64_t i = 1; i < count_; i++) {
            const int32_t before = order_[i - 1], r = order_[i];
            const int64_t both = std::min(whole(before), whole(r));
            int32_t equal = 0;
            while (equal < both && are_equal(before, r, equal)) equal++;
            shared_[i] = equal;
            of_row_[before] = std::max(of_row_[before], equal);
            of_row_[r] = equal;
            most_ = std::max(most_, equal);
        }
    }

    // The number of segments, the first ones, that row r computes together with other rows.
    int64_t of(int64_t r) const { return of_row_[r]; }

    // Calls f(segment, rows, count) for the rows that compute a segment together.
    template <class F>
    void each(F&& f) const {
        for (int64_t segment = 0; segment < most_; segment++) {
            for (int64_t i = 0, end; i < count_; i = end) {
                for (end = i + 1; end < count_ && shared_[end] > segment;) end++;
                if (end > i + 1) f(segment, order_ + i, end - i);
            }
        }
    }

private:
    // Segments that all queries of row r see whole.
    int64_t whole(int64_t r) const {
        return (step_.context_lens[r] - (step_.query_starts[r + 1] - step_.query_starts[r]) + 1) / kSegment;
    }
    const int32_t* table(int64_t r) const { return step_.block_tables + r * step_.table_stride; }
    // Bytes of a segment in a table.
    int64_t bytes() const { return kSegment / step_.block_size * sizeof(int32_t); }
    bool are_equal(int64_t a, int64_t b, int64_t segment) const {
        const int64_t first = segment * (kSegment / step_.block_size);
        return !std::memcmp(table(a) + first, table(b) + first, bytes());
    }

    const AttentionStep& step_;
    int32_t* order_;   // rows
    int32_t* shared_;  // by place in order_: segments that are equal to those of the row before
    int32_t* of_row_;  // by row: see of()
    int64_t count_ = 0;
    int32_t most_ = 0;  // of of_row_
};

// With fewer tiles than this for each thread, contexts are split.
constexpr int64_t kTilesPerThread = 8;
// The most items with shared segments for each thread, if they can be larger instead.
constexpr int64_t kSharedPerThread = 2;

// Fills step.items, step.splits and step.sharers, and counts the first two, for the first rows, which have `tokens`
// queries together. A row of several queries is cut into tiles of nearly equal height, of at most tile_rows query heads
// per KV head. The segments of a context are computed apart, and their results combined afterwards (a split), for rows
// of one query, for rows of one tile that share segments, and for all rows of one tile in a step that has few tiles,
// where a tile may be twice as high. The caller provides room for as many items as there are queries, rows and segments
// in all contexts together, for one split a row, and for a sharer for each query and segment in rows of one tile.
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
    int64_t rows = 0, tiles = 0, room = 0;
    for (; step.query_starts[rows] < tokens; rows++) {
        tiles += tiles_of(rows);
        room += tiles_of(rows) + step.context_lens[rows] / kSegment;
    }
    is_small = tiles * step.kv_heads < kTilesPerThread * threads();
    auto* planned = static_cast<Planned*>(
        scratch(kSlotRows, room * sizeof(Planned) + (SharedSegments::room(rows) + rows) * sizeof(int32_t)));
    auto* first_partials = reinterpret_cast<int32_t*>(planned + room);
    const SharedSegments shared(step, rows, first_partials + rows, [&](int64_t r) { return tiles_of(r) == 1; });
    auto may_split = [&](int64_t r) {
        return tiles_of(r) == 1 && (is_small || queries_of(r) == 1 || shared.of(r) > 0);
    };
    auto* splits = reinterpret_cast<Split*>(step.splits);
    int64_t num_items = 0, num_splits = 0, num_partials = 0;
    auto add = [&](int64_t keys, int64_t row, int64_t query, int64_t queries, int64_t begin, int64_t end,
                   int64_t partial) {
        auto to32 = [](int64_t number) { return static_cast<int32_t>(number); };
        planned[num_items++] = {queries * std::min((end - begin) * kSegment, keys),
                                {to32(row), to32(query), to32(queries), to32(begin), to32(end), to32(partial)}};
    };
    int64_t num_shared = 0;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t queries = queries_of(r), first = step.context_lens[r] - queries, of_row = tiles_of(r);
        for (int64_t i = 0; i < of_row; i++) {
            const int64_t q = queries * i / of_row, count = queries * (i + 1) / of_row - q, position = first + q;
            const int64_t begin = first_segment(position), end = end_segment(position + count), keys = position + count;
            if (!may_split(r) || (end - begin == 1 && !shared.of(r))) {
                add(keys, r, q, count, begin, end, Item::kComplete);
                continue;
            }
            splits[num_splits++] = {static_cast<int32_t>(step.query_starts[r] + q), static_cast<int32_t>(count),
                                    static_cast<int32_t>(num_partials), static_cast<int32_t>(end - begin)};
            first_partials[r] = static_cast<int32_t>(num_partials);
            num_shared += shared.of(r) * count;
            for (int64_t s = begin + shared.of(r); s < end; s++) {
                add(keys, r, q, count, s, s + 1, num_partials + (s - begin) * count);
            }
            num_partials += (end - begin) * count;
        }
    }
    const int64_t for_each_thread = num_shared * step.kv_heads / (kSharedPerThread * threads());
    const int64_t most_sharers = std::clamp<int64_t>(for_each_thread, 1, 2 * most_queries);
    auto* sharers = reinterpret_cast<Sharer*>(step.sharers);
    int64_t num_sharers = 0;
    shared.each([&](int64_t segment, const int32_t* together, int64_t count) {
        const int64_t before = num_sharers;
        for (const int32_t* r = together; r < together + count; r++) {
            for (int32_t q = 0, queries = queries_of(*r); q < queries; q++) {
                const int64_t partial = first_partials[*r] + segment * queries + q;
                sharers[num_sharers++] = {step.query_starts[*r] + q, static_cast<int32_t>(partial)};
            }
        }
        // There is room for an item a row.
        const int64_t queries = num_sharers - before;
        const int64_t items = std::min((queries + most_sharers - 1) / most_sharers, count);
        for (int64_t i = 0; i < items; i++) {
            const int64_t q = queries * i / items, height = queries * (i + 1) / items - q;
            add(kSegment, *together, before + q, height, segment, segment + 1, Item::kShared);
        }
    });
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
