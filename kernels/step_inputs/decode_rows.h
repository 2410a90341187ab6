// A step whose rows all decode: fills its batch from the arrays of worker/step/rows.py, and updates them afterwards.
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
    int64_t most_rows, table_stride;

    bool decodes(int64_t row) const {
        if (row >= num_rows) return false;
        const int64_t after = num_computed_tokens[row] + 1;
        return after == num_tokens[row] && after <= num_blocks[row] * block_size && after <= max_model_len;
    }
};

// Counts the last token of each row as computed, and fills the batch with these tokens. Returns the number of blocks of
// the longest context; 0, with nothing changed, if a row cannot decode: it does not exist, occurs twice, has more or
// fewer than one token to compute, or too few blocks.
inline int64_t begin_decodes(const DecodeRows& all, const uint16_t* rows, int64_t count) {
    if (count < 1 || count > all.most_rows) return 0;
    int64_t longest = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = rows[i];
        if (!all.decodes(row)) {  // also fails for a row that has been counted already
            while (i-- > 0) all.num_computed_tokens[rows[i]]--;
            return 0;
        }
        longest = std::max(longest, ++all.num_computed_tokens[row]);
    }
    const int64_t blocks = (longest + all.block_size - 1) / all.block_size;
    all.query_starts[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = rows[i], position = all.num_computed_tokens[row] - 1;
        const int32_t* table = all.block_ids + row * all.block_stride;
        all.batch_token_ids[i] = all.token_ids[row * all.token_stride + position];
        all.positions[i] = position;
        all.slots[i] = table[position / all.block_size] * all.block_size + position % all.block_size;
        all.query_starts[i + 1] = static_cast<int32_t>(i + 1);
        all.context_lens[i] = static_cast<int32_t>(position + 1);
        all.logit_indices[i] = i;
        std::copy(table, table + blocks, all.block_tables + i * all.table_stride);
    }
    return blocks;
}

// Appends the sampled tokens[i] to rows[i], and fills in the token's sequence, position in the output, and id. Returns
// false, with nothing changed, if a row has failed before or its likeliest token's logit is not finite.
inline bool end_decodes(const DecodeRows& all, const uint16_t* rows, int64_t count, const int64_t* tokens,
                        const float* logits, int64_t* sequences, int32_t* positions, int32_t* token_ids) {
    for (int64_t i = 0; i < count; i++) {
        if (all.failed[rows[i]] || !std::isfinite(logits[i])) return false;
    }
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = rows[i], place = all.num_tokens[row]++;
        sequences[i] = all.sequences[row];
        positions[i] = static_cast<int32_t>(place - all.num_prompt_tokens[row]);
        token_ids[i] = all.token_ids[row * all.token_stride + place] = static_cast<int32_t>(tokens[i]);
    }
    return true;
}

}  // namespace octavo
