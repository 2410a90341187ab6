"""Which logprobs of prompts a step computes.

Shape suffixes: S scheduled rows, P prompt positions of one row.
"""

from dataclasses import dataclass

import numpy as np

from worker.rows import Rows
from worker.sampling_state import NO_LOGPROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompt:
    """Wanted: the logprob of targets_P[i] after token first_token + i of the step, which is that of the token at
    first_position + i of the prompt."""

    sequence: int
    first_token: int
    first_position: int
    targets_P: np.ndarray  # int64
    # So many most likely tokens beside each.
    num_top: int


def scored_prompts(
    rows: Rows, rows_S: np.ndarray, query_starts: np.ndarray, context_lens_S: np.ndarray
) -> list[ScoredPrompt]:
    """Of a step whose tokens are counted as computed, and whose samples are not appended yet.

    A row that came with output has delivered them before. query_starts: [S + 1]; context_lens_S: tokens of each row
    that are computed after the step.
    """
    wanted_S = rows.sampling.prompt_logprobs_R[rows_S] != NO_LOGPROBS
    scored = np.flatnonzero(wanted_S & (rows.num_tokens_R[rows_S] == rows.num_prompt_tokens_R[rows_S]))
    return [_scored(rows, int(rows_S[i]), query_starts[i : i + 2], int(context_lens_S[i])) for i in scored.tolist()]


def _scored(rows: Rows, row: int, query: np.ndarray, context_len: int) -> ScoredPrompt:
    """The prompt tokens that follow the step's tokens of one row."""
    start, end = query.tolist()
    first_position = context_len - (end - start) + 1
    # The last prompt token is followed by the first sampled one.
    targets = rows.token_ids_RL[row, first_position : rows.num_prompt_tokens_R[row]][: end - start]
    return ScoredPrompt(
        sequence=int(rows.sequence_R[row]),
        first_token=start,
        first_position=first_position,
        targets_P=targets.astype(np.int64),
        num_top=int(rows.sampling.prompt_logprobs_R[row]),
    )
