"""What the rows of a step sample, drafts verified: a draft counts if the row's own draw says the same token.

So output never depends on drafts: each position is sampled with its own (seed, choice, position) number from logits
over the tokens that were really said before it.

Shape suffixes: N sampling rows of the step, D drafts of the longest row, L logits (a row's count of drafts, and 1), V
vocabulary.
"""

from dataclasses import dataclass, field

import numpy as np

from protos import inference_pb2
from worker.rows import Rows
from worker.sampler import sample


@dataclass(slots=True, kw_only=True)
class StepTokens:
    """Row i said tokens_ND1[i, : counts_N[i]]. logprobs: by (row, token), for rows that asked and did not fail."""

    tokens_ND1: np.ndarray  # int64
    counts_N: np.ndarray  # int64
    failed_N: np.ndarray  # bool: logits were not finite
    logprobs: dict[tuple[int, int], inference_pb2.TokenLogprobs] = field(default_factory=dict)


def sample_rows(rows: Rows, rows_N: np.ndarray, num_drafts_N: np.ndarray | None, logits_LV: np.ndarray) -> StepTokens:
    """Samples each row's next tokens, up to and including the first that differs from the draft after it, and appends
    them to the rows. What was drafted beyond that is forgotten.

    logits_LV: float32, at each row's last token before its drafts, then at each draft; changed in place where rows have
    penalties. num_drafts_N: int64; None for none at all.
    """
    if num_drafts_N is None:
        num_drafts_N = np.zeros(len(rows_N), np.int64)
    rows.settle_drafts(rows_N, num_drafts_N)
    width = int(num_drafts_N.max(initial=0)) + 1
    said = StepTokens(
        tokens_ND1=np.zeros((len(rows_N), width), np.int64),
        counts_N=np.zeros(len(rows_N), np.int64),
        failed_N=np.zeros(len(rows_N), np.bool_),
    )
    first_N = (num_drafts_N + 1).cumsum() - (num_drafts_N + 1)
    going = np.arange(len(rows_N))
    for turn in range(width):
        # Without drafts the logits are taken as they are, not copied.
        logits_NV = logits_LV if width == 1 else logits_LV[first_N[going] + turn]
        going = going[_sample_turn(rows, rows_N, going, turn, logits_NV, said) & (num_drafts_N[going] > turn)]
        if not len(going):
            break
    return said


def _sample_turn(
    rows: Rows, rows_N: np.ndarray, going: np.ndarray, turn: int, logits_NV: np.ndarray, said: StepTokens
) -> np.ndarray:
    """One token for each row of rows_N[going]. Returns which of them said what was drafted there, if anything was."""
    rows_G = rows_N[going]
    sampled = sample(logits_NV, rows.sampling, rows_G, rows.output_positions(rows_G))
    drafted_G = rows.token_ids_RL[rows_G, rows.num_tokens_R[rows_G]]
    # A failed row takes token 0 and goes on: a step planned before the scheduler knows may name it once more.
    rows.append(rows_G, sampled.token_ids_N)
    said.tokens_ND1[going, turn] = sampled.token_ids_N
    said.counts_N[going] += 1
    said.failed_N[going] |= sampled.failed_N
    said.logprobs.update(((int(going[i]), turn), entry) for i, entry in sampled.logprobs.items())
    return (drafted_G == sampled.token_ids_N) & ~sampled.failed_N
