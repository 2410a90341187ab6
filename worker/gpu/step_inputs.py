"""A step between the host and the GPU: what goes there, and what comes back.

Shape suffixes: S scheduled rows, T tokens of the step, N sampling rows, D drafts of the longest row, L scored positions
(a sampling row's drafts, and 1), P prompt positions whose logprobs are wanted, C changed entries, K most likely tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# A token that the host need not know: the last one that its row sampled, which may not have been chosen yet.
LAST_SAMPLED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """What changes a row's logits before temperature, in this order: logit bias, penalties, min_tokens."""

    bias_token_ids: np.ndarray  # int32, distinct
    bias: np.ndarray  # float32
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    # That the row came with; counted if there are penalties.
    prompt_token_ids: np.ndarray  # int32
    output_token_ids: np.ndarray  # int32
    # Below so many output tokens, banned tokens are not chosen.
    min_tokens: int = 0
    banned_token_ids: np.ndarray  # int32


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How a row that is new in this step samples. Resolved and checked."""

    row: int
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # uint64
    choice: int = 0
    # So many most likely tokens with logprobs beside the chosen one's; None: no logprobs.
    num_logprobs: int | None = None
    adjustments: Adjustments | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChanges:
    """block_tables[rows_C[i], places_C[i]] = block_ids_C[i]; distinct places. int32."""

    rows_C: np.ndarray
    places_C: np.ndarray
    block_ids_C: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Wanted: the logprob of targets_P[i] after token tokens_P[i] of the step. int32."""

    tokens_P: np.ndarray
    targets_P: np.ndarray
    num_top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """A step as the host knows it, before the results of the steps under way."""

    # --- The batch. int32 all.
    rows_S: np.ndarray  # permanent rows, distinct
    query_starts: np.ndarray  # [S + 1], begins with 0: row i computes tokens query_starts[i] : query_starts[i + 1]
    context_lens_S: np.ndarray  # tokens of each row whose KV exists after this step
    token_ids_T: np.ndarray  # LAST_SAMPLED where the row's own last token is meant
    # --- Which of its rows sample, as indices into S.
    sampling_N: np.ndarray
    output_positions_N: np.ndarray  # index in its output of the first token that each samples
    # The last num_drafts_N[i] tokens of a row are drafts. None: there are none.
    num_drafts_N: np.ndarray | None = None
    prompt_scores: PromptScores | None = None
    # --- What changes before.
    freed_rows: Sequence[int] = ()
    # Free before, or freed above.
    new_rows: Sequence[RowSampling] = ()
    table_changes: TableChanges | None = None

    @property
    def only_decodes(self) -> bool:
        """Every row computes one token, and samples."""
        return len(self.token_ids_T) == len(self.rows_S) == len(self.sampling_N) and self.num_drafts_N is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Of the model's own logits, before temperature, penalties and filters. An entry for each position that asked."""

    positions: np.ndarray  # int64, among L (of sampled tokens) or P (of prompts)
    chosen: np.ndarray  # float32
    ranks: np.ndarray  # int64, from 1
    top_ids_K: np.ndarray  # int64 [positions, K]; equals by id
    top_K: np.ndarray  # float32 [positions, K]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """Row sampling_N[i] said tokens_ND1[i, : counts_N[i]]; -1 is a position whose logits were not finite."""

    tokens_ND1: np.ndarray  # int32
    counts_N: np.ndarray  # int32
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    # Seconds between the step's begin and end on the device.
    seconds: float = field(default=0.0)
