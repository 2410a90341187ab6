// A step whose rows all decode, with or without drafts: fills its batch from the arrays of worker/step/rows.py, and
// updates them afterwards.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace octavo {

// The arrays of all rows, and those of a batch (worker/step/batch.py). Matches DecodeRowsStruct in
// kernels/step_inputs/native.py.
struct DecodeRows {
    int32_t* token_ids;        // [num_rows][token_stride]
    const int32_t* block_ids;  // [num_rows][block_stride]
    const int64_t* num_blocks;
    int64_t* num_tokens;
    const int64_t* num_prompt_tokens;
    int64_t* num_computed_tokens;
    const int64_t* sequences;
    const bool* failed;
    int64_t num_rows, token_stride, block_stride, block_size, max_model_len;

    int64_t *batch_token_ids, *positions, *slots;
    int32_t *query_starts, *context_lens, *block_tables;
    int64_t* logit_indices;
    int64_t most_rows, most_tokens, table_stride;

    // True if the row has one token to compute, and room for it and its drafts.
    bool decodes(int64_t row, int64_t drafts) const {
        if (row >= num_rows || drafts < 0) return false;
        const int64_t after = num_computed_tokens[row] + 1;
        return after == num_tokens[row] && after + drafts <= num_blocks[row] * block_size &&
               after + drafts <= max_model_len;
    }
};

// Rows that decode, and the drafts of each, one row's after the other's.
struct Decodes {
    const uint16_t* rows;
    int64_t count;
    const int64_t* num_drafts;  // null: none
    const int64_t* drafts;

    int64_t drafts_of(int64_t i) const { return num_drafts ? num_drafts[i] : 0; }
};

// Appends the drafts to their rows, counts each row's last token and its drafts as computed, and fills the batch with
// these tokens. Returns the number of blocks of the longest context; 0, with nothing changed, if a row cannot decode: it
// does not exist, occurs twice, has more or fewer than one token to compute, or too few blocks.
inline int64_t begin_decodes(const DecodeRows& all, const Decodes& step) {
    if (step.count < 1 || step.count > all.most_rows) return 0;
    int64_t longest = 0, tokens = 0;
    for (int64_t i = 0; i < step.count; i++) {
        const int64_t row = step.rows[i], more = step.drafts_of(i);
        tokens += 1 + more;
        if (!all.decodes(row, more) || tokens > all.most_tokens) {  // `decodes` also fails for a row counted already
            while (i-- > 0) {
                all.num_tokens[step.rows[i]] -= step.drafts_of(i);
                all.num_computed_tokens[step.rows[i]] -= 1 + step.drafts_of(i);
            }
            return 0;
        }
        all.num_tokens[row] += more;
        all.num_computed_tokens[row] += 1 + more;
        longest = std::max(longest, all.num_computed_tokens[row]);
    }
    const int64_t blocks = (longest + all.block_size - 1) / all.block_size;
    const int64_t* draft = step.drafts;
    all.query_starts[0] = 0;
    for (int64_t i = 0, t = 0; i < step.count; i++) {
        const int64_t row = step.rows[i], more = step.drafts_of(i), end = all.num_computed_tokens[row];
        int32_t* ids = all.token_ids + row * all.token_stride;
        const int32_t* table = all.block_ids + row * all.block_stride;
        for (int64_t d = 0; d < more; d++) ids[end - more + d] = static_cast<int32_t>(*draft++);
        for (int64_t position = end - more - 1; position < end; position++, t++) {
            all.batch_token_ids[t] = ids[position];
            all.positions[t] = position;
            all.slots[t] = table[position / all.block_size] * all.block_size + position % all.block_size;
            all.logit_indices[t] = t;
        }
        all.query_starts[i + 1] = static_cast<int32_t>(t);
        all.context_lens[i] = static_cast<int32_t>(end);
        std::copy(table, table + blocks, all.block_tables + i * all.table_stride);
    }
    return blocks;
}

// The sampled tokens of a step, by row; token_ids are those of all rows, one after the other.
struct SampledTokens {
    int64_t* sequences;
    int32_t *positions, *counts, *token_ids;
};

// Appends to each row its sampled tokens, up to and including the first that differs from its draft, and drops the
// other drafts. tokens, logits: the likeliest token and its logit after each token of the batch. Returns the number of
// tokens of all rows; 0, with nothing changed, if a row has failed before or a logit that counts is not finite.
inline int64_t end_decodes(const DecodeRows& all, const Decodes& step, const int64_t* tokens, const float* logits,
                           const SampledTokens& said) {
    for (int64_t i = 0, t = 0; i < step.count; i++) {
        const int64_t row = step.rows[i], more = step.drafts_of(i);
        const int32_t* drafts = all.token_ids + row * all.token_stride + all.num_tokens[row] - more;
        int64_t right = 0;
        while (right < more && std::isfinite(logits[t + right]) && tokens[t + right] == drafts[right]) right++;
        if (all.failed[row] || !std::isfinite(logits[t + right])) return 0;
        said.counts[i] = static_cast<int32_t>(right + 1);
        t += 1 + more;
    }
    int64_t total = 0;
    for (int64_t i = 0, t = 0; i < step.count; i++) {
        const int64_t row = step.rows[i], more = step.drafts_of(i), known = all.num_tokens[row] - more;
        const int64_t last = said.counts[i] - 1;
        int32_t* ids = all.token_ids + row * all.token_stride + known;
        ids[last] = static_cast<int32_t>(tokens[t + last]);
        std::copy(ids, ids + last + 1, said.token_ids + total);
        said.sequences[i] = all.sequences[row];
        said.positions[i] = static_cast<int32_t>(known - all.num_prompt_tokens[row]);
        all.num_tokens[row] = known + last + 1;
        all.num_computed_tokens[row] = known + last;
        total += last + 1;
        t += 1 + more;
    }
    return total;
}

}  // namespace octavo
