"""The inputs that a step sends to a device (changed rows, tokens, tables), and the arrays that come back."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from worker.sampling.features import RowSampling

# Placeholder for the token that the row sampled last: it is on the device, and may not be chosen yet.
LAST_SAMPLED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChanges:
    """block_tables[rows_C[i], places_C[i]] = block_ids_C[i]; distinct places. int32."""

    rows_C: np.ndarray
    places_C: np.ndarray
    block_ids_C: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Requested prompt logprobs: that of targets_P[i] after token tokens_P[i] of the step. int32."""

    tokens_P: np.ndarray
    targets_P: np.ndarray
    num_top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """A step as the host knows it, while the results of earlier steps may still be outstanding."""

    # --- The batch. All int32.
    rows_S: np.ndarray  # permanent rows, distinct
    query_starts: np.ndarray  # [S + 1], begins with 0: row i computes tokens query_starts[i] : query_starts[i + 1]
    context_lens_S: np.ndarray  # tokens of each row whose KV exists after this step
    token_ids_T: np.ndarray  # LAST_SAMPLED stands for the row's last sampled token
    # --- The rows that sample, as indices into S.
    sampling_N: np.ndarray
    output_positions_N: np.ndarray  # each row's output index of the first token that it samples
    # The last num_drafts_N[i] tokens of a row are drafts. None: there are none.
    num_drafts_N: np.ndarray | None = None
    prompt_scores: PromptScores | None = None
    # --- Changes to apply before the step.
    freed_rows: Sequence[int] = ()
    # Each of these was free before, or is in freed_rows.
    new_rows: Sequence[RowSampling] = ()
    table_changes: TableChanges | None = None
    # --- Images and videos.
    # What is added to the positions of each row's tokens, where positions have three axes. None: nothing, for all rows.
    rope_shifts_S: np.ndarray | None = None
    # int32 [3, T]: positions by time, height and width. None: all axes of a token's position are equal.
    rope_positions_AT: np.ndarray | None = None
    # Tokens embedded_places_M (int64, indices into T) have these embeddings, on the device. None: no token has.
    embedded_places_M: np.ndarray | None = None
    embeddings_ME: torch.Tensor | None = None

    @property
    def has_items(self) -> bool:
        """True if the step computes tokens of items, or of a prompt with items."""
        return self.rope_positions_AT is not None or self.embedded_places_M is not None

    @property
    def only_decodes(self) -> bool:
        """True if every row computes one token, and samples."""
        return self.only_decodes_with_drafts and self.num_drafts_N is None

    @property
    def only_decodes_with_drafts(self) -> bool:
        """True if every row samples after each of its tokens: it computes its last token, and any number of drafts."""
        num_drafts = 0 if self.num_drafts_N is None else int(self.num_drafts_N.sum())
        return len(self.token_ids_T) - num_drafts == len(self.rows_S) == len(self.sampling_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Logprobs of the model's own logits, before temperature, penalties and filters; one entry for each position that
    asked."""

    positions: np.ndarray  # int64, indices into L (sampled tokens) or P (prompts)
    chosen: np.ndarray  # float32
    ranks: np.ndarray  # int64, from 1
    top_ids_K: np.ndarray  # int64 [positions, K]; ties in order of id
    top_K: np.ndarray  # float32 [positions, K]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """Results of a step: row sampling_N[i] sampled tokens_ND1[i, : counts_N[i]]; -1 where logits were not finite."""

    tokens_ND1: np.ndarray  # int32
    counts_N: np.ndarray  # int32
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    # Seconds from the step's begin to its end on the device.
    seconds: float = field(default=0.0)


@dataclass(slots=True)
class RowChanges:
    """The changes of one plan, in the order in which it is applied: freed rows, then new rows, then tables."""

    freed_rows: list[int] = field(default_factory=list)
    # The sequences that the freed rows held.
    freed_sequences: list[int] = field(default_factory=list)
    new_rows: list[RowSampling] = field(default_factory=list)
    # (rows, places, block ids) of written entries, int64; the entries of one tuple are distinct.
    _tables: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)

    def free(self, row: int, sequence: int) -> None:
        self.freed_rows.append(row)
        self.freed_sequences.append(sequence)

    def write_table(self, rows_C: np.ndarray, places_C: np.ndarray, block_ids_C: np.ndarray) -> None:
        self._tables.append((rows_C, places_C, block_ids_C))

    @property
    def tables(self) -> Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(rows, places, block ids) of the written entries, in the order of writing; those of one tuple are
        distinct."""
        return self._tables

    def block_ids(self) -> np.ndarray:
        """Returns all block ids that were written, int64."""
        return np.concatenate([block_ids_C for _, _, block_ids_C in self._tables] or [np.empty(0, np.int64)])

    def table_changes(self) -> TableChanges | None:
        """Returns the changed table entries, or None. Trimmed entries keep their values: nothing reads them."""
        if not self._tables:
            return None
        rows_C, places_C, block_ids_C = (np.concatenate(columns) for columns in zip(*self._tables, strict=True))
        if len(self._tables) > 1:
            # An entry of a row that one plan filled, trimmed and grew was written twice: the last value counts.
            entries = np.stack((rows_C, places_C))[:, ::-1]
            last = len(rows_C) - 1 - np.unique(entries, axis=1, return_index=True)[1]
            rows_C, places_C, block_ids_C = rows_C[last], places_C[last], block_ids_C[last]
        return TableChanges(
            rows_C=rows_C.astype(np.int32),
            places_C=places_C.astype(np.int32),
            block_ids_C=block_ids_C.astype(np.int32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """The work of a step: row rows_S[i] computes its next num_tokens_S[i] tokens, of which the last num_drafts_S[i] are
    drafts. int64 [S]."""

    rows_S: np.ndarray
    num_tokens_S: np.ndarray
    # None: no row has drafts.
    num_drafts_S: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRows:
    """The rows of a batch, in its order, and those of them that sample. int64."""

    rows_S: np.ndarray
    rows_N: np.ndarray
    # int64 [N]. None: no row has drafts.
    num_drafts_N: np.ndarray | None = None
    # The batch was filled by worker.cpu.runner.Decodes.
    all_decode: bool = False
