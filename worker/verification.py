"""What the rows of a step sample, drafts verified: a draft counts if the row's own draw says the same token.

So output never depends on drafts: each position is sampled with its own (seed, choice, position) number from logits
over the tokens that were really said before it.

Shape suffixes: N sampling rows of the step, D drafts of the longest row, L positions that were scored (a row's count of
drafts, and 1).
"""

from dataclasses import dataclass, field

import numpy as np

from kernels.native import NativeKernels
from protos import inference_pb2
from worker.rows import Rows
from worker.sampler import Sampled, sample
from worker.scores import Scores


@dataclass(slots=True, kw_only=True)
class StepTokens:
    """Row i said tokens_ND1[i, : counts_N[i]]. logprobs: by (row, token), for rows that asked and did not fail."""

    tokens_ND1: np.ndarray  # int64
    counts_N: np.ndarray  # int64
    failed_N: np.ndarray  # bool: logits were not finite
    logprobs: dict[tuple[int, int], inference_pb2.TokenLogprobs] = field(default_factory=dict)

    @classmethod
    def one_each(cls, tokens_N: np.ndarray) -> "StepTokens":
        """Of rows that have neither drafts nor failed."""
        num_rows = len(tokens_N)
        return cls(
            tokens_ND1=tokens_N[:, None], counts_N=np.ones(num_rows, np.int64), failed_N=np.zeros(num_rows, np.bool_)
        )


def sample_rows(
    rows: Rows,
    rows_N: np.ndarray,
    num_drafts_N: np.ndarray | None,
    scores: Scores,
    kernels: NativeKernels | None,
) -> StepTokens:
    """Samples each row's next tokens, up to and including the first that differs from the draft after it, and appends
    them to the rows. What was drafted beyond that is forgotten.

    scores: at each row's last token before its drafts, then at each draft. num_drafts_N: int64; None for none at all.
    kernels: see worker.sampler.sample.
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
        rows_G = rows_N[going]
        sampled = sample(scores, first_N[going] + turn, rows.sampling, rows_G, rows.output_positions(rows_G), kernels)
        going = going[_say(rows, rows_N, going, turn, sampled, said) & (num_drafts_N[going] > turn)]
        if not len(going):
            break
    return said


def _say(
    rows: Rows, rows_N: np.ndarray, going: np.ndarray, turn: int, sampled: Sampled, said: StepTokens
) -> np.ndarray:
    """Takes one token for each row of rows_N[going]. Returns which of them said what was drafted there, if anything
    was."""
    rows_G = rows_N[going]
    drafted_G = rows.token_ids_RL[rows_G, rows.num_tokens_R[rows_G]]
    # A failed row takes token 0 and goes on: a step planned before the scheduler knows may name it once more.
    rows.append(rows_G, sampled.token_ids_N)
    said.tokens_ND1[going, turn] = sampled.token_ids_N
    said.counts_N[going] += 1
    said.failed_N[going] |= sampled.failed_N
    said.logprobs.update(((int(going[i]), turn), entry) for i, entry in sampled.logprobs.items())
    return (drafted_G == sampled.token_ids_N) & ~sampled.failed_N
