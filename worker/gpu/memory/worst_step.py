"""The step that takes the most memory, to be measured before there is a KV cache."""

import numpy as np

from worker.gpu.step_inputs import Adjustments, PromptScores, RowSampling, StepInputs, TableChanges
from worker.row_sampling import MAX_LOGPROBS


def worst_step(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int, vocab_size: int
) -> StepInputs:
    """The step that takes the most memory: all tokens, in all rows, each of which samples with everything a request can
    ask for. It writes to KV block 1 alone, over and over: what it computes means nothing."""
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    num_tokens = min(max_num_batched_tokens, num_rows * max_model_len)
    lengths = np.full(num_rows, num_tokens // num_rows, np.int32)
    lengths[: num_tokens % num_rows] += 1
    query_starts = np.concatenate(([0], lengths.cumsum())).astype(np.int32)
    rows = np.arange(num_rows, dtype=np.int32)
    blocks = -(-lengths // block_size)
    first_of_row = np.repeat(blocks.cumsum() - blocks, blocks)
    places = np.arange(blocks.sum()) - first_of_row
    last = np.zeros(num_tokens, bool)
    last[query_starts[1:] - 1] = True
    scored = np.flatnonzero(~last).astype(np.int32)
    scores = PromptScores(tokens_P=scored, targets_P=np.zeros_like(scored), num_top=min(MAX_LOGPROBS, vocab_size))
    return StepInputs(
        rows_S=rows,
        query_starts=query_starts,
        context_lens_S=lengths,
        token_ids_T=np.zeros(num_tokens, np.int32),
        sampling_N=rows,
        output_positions_N=np.zeros(num_rows, np.int32),
        prompt_scores=scores if len(scored) else None,
        new_rows=[_every_kind_of_sampling(row, vocab_size) for row in range(num_rows)],
        table_changes=TableChanges(
            rows_C=np.repeat(rows, blocks),
            places_C=places.astype(np.int32),
            block_ids_C=np.ones(len(places), np.int32),
        ),
    )


def _every_kind_of_sampling(row: int, vocab_size: int) -> RowSampling:
    return RowSampling(
        row=row,
        temperature=1.0,
        top_k=min(50, vocab_size),
        top_p=0.9,
        min_p=0.01,
        seed=row,
        num_logprobs=min(MAX_LOGPROBS, vocab_size),
        adjustments=Adjustments(
            bias_token_ids=np.zeros(1, np.int32),
            bias=np.ones(1, np.float32),
            repetition=1.1,
            presence=0.1,
            frequency=0.1,
            prompt_token_ids=np.zeros(1, np.int32),
            output_token_ids=np.zeros(0, np.int32),
            min_tokens=1,
            banned_token_ids=np.zeros(1, np.int32),
        ),
    )
