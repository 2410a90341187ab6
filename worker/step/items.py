"""Images and videos among the tokens of rows: which tokens embeddings replace, and positions with three axes.

Shape suffixes: R permanent rows, S scheduled rows, T tokens of the step, M tokens that embeddings replace, A the three
axes (time, height, width), P tokens of a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from runtime.media.positions import mrope_positions
from worker.errors import PlanError

if TYPE_CHECKING:
    # Imported for its types alone: GPU benchmarks run where protobuf is not installed.
    from protos import step_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemTokens:
    """How a model takes items. has_axes: its positions have three axes (M-RoPE)."""

    # The token ids that embeddings replace, within an item's tokens.
    embedded: frozenset[int]
    has_axes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedTokens:
    """The tokens of a step that embeddings replace: those at places_M, indices into T, in the order of `parts`."""

    places_M: np.ndarray  # int64
    # (item, first, end): its embeddings first to end - 1.
    parts: Sequence[tuple[int, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItems:
    """The special properties of a step's tokens. None: there are none."""

    embedded: EmbeddedTokens | None
    # int64 [A, T]. None: all axes are equal.
    positions_AT: np.ndarray | None


class _RowItems:
    """The items of one row's prompt."""

    def __init__(self, new: "step_pb2.NewRow", prompt: np.ndarray, tokens: ItemTokens) -> None:
        """Raises PlanError for items that do not fit the prompt."""
        self._numbers: list[int] = []
        # Where each item's tokens begin in embedded_M, and the end of the last one.
        self._starts = [0]
        places: list[np.ndarray] = []
        end, ids = 0, np.fromiter(tokens.embedded, np.int64, len(tokens.embedded))
        for item in new.items:
            if not end <= item.first_token < item.first_token + item.num_tokens <= len(prompt):
                raise PlanError(
                    f"new_rows: item {item.number} of row {new.row} has tokens {item.first_token} to "
                    f"{item.first_token + item.num_tokens}; items follow each other within {len(prompt)} prompt tokens"
                )
            end = item.first_token + item.num_tokens
            places.append(item.first_token + np.flatnonzero(np.isin(prompt[item.first_token : end], ids)))
            self._numbers.append(item.number)
            self._starts.append(self._starts[-1] + len(places[-1]))
        self._places_M = np.concatenate(places)
        self.end = int(self._places_M[-1]) + 1 if len(self._places_M) else 0
        self.shift = 0
        self.positions_AP: np.ndarray | None = None
        if tokens.has_axes:
            try:
                self.positions_AP, self.shift = mrope_positions(len(prompt), new.items)
            except ValueError as error:
                raise PlanError(f"new_rows: items of row {new.row}: {error}") from None
            self.end = len(prompt)

    def embedded(self, first: int, end: int) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
        """Returns the positions of the tokens from `first` to end - 1 that embeddings replace, and those embeddings."""
        low, high = np.searchsorted(self._places_M, (first, end)).tolist()
        parts = [
            (number, max(low, start) - start, min(high, stop) - start)
            for number, start, stop in zip(self._numbers, self._starts[:-1], self._starts[1:], strict=True)
            if start < high and low < stop
        ]
        return self._places_M[low:high], parts


class ItemRows:
    """The items of all rows."""

    def __init__(self, tokens: ItemTokens, num_rows: int) -> None:
        self.tokens = tokens
        self._rows: dict[int, _RowItems] = {}
        # Tokens from here on are like others, but for the shift; 0: the row has no items.
        self._end_R = np.zeros(num_rows, np.int64)
        # From a token's place in the row to its position, for tokens from _end_R on.
        self.shift_R = np.zeros(num_rows, np.int64)

    @property
    def has_any(self) -> bool:
        return bool(self._rows)

    def fill(self, new: "step_pb2.NewRow", prompt: np.ndarray) -> None:
        """Notes a new row. Raises PlanError."""
        row = _RowItems(new, prompt, self.tokens)
        self._rows[new.row] = row
        self._end_R[new.row], self.shift_R[new.row] = row.end, row.shift

    def free(self, row: int) -> None:
        if self._rows.pop(row, None) is not None:
            self._end_R[row] = self.shift_R[row] = 0

    def of_step(self, rows_S: np.ndarray, query_starts: np.ndarray, positions_T: np.ndarray) -> StepItems | None:
        """Returns what is special about a step, in which row rows_S[i] computes tokens query_starts[i] to
        query_starts[i + 1] - 1, at places positions_T of their rows. None: all tokens are text, and all axes of a
        token's position are equal."""
        if not self._rows:
            return None
        starts_S = query_starts[:-1]
        has_tokens_S = starts_S < query_starts[1:]
        firsts_S = positions_T[np.minimum(starts_S, max(0, len(positions_T) - 1))]
        special = np.flatnonzero(has_tokens_S & (firsts_S < self._end_R[rows_S]))
        if not len(special):
            return None
        positions_AT = None
        if self.tokens.has_axes:
            shifted_T = positions_T + self.shift_R[rows_S].repeat(np.diff(query_starts))
            positions_AT = np.tile(shifted_T.astype(np.int64), (3, 1))
        places: list[np.ndarray] = []
        parts: list[tuple[int, int, int]] = []
        for i in special.tolist():
            row, start, first = self._rows[int(rows_S[i])], int(query_starts[i]), int(firsts_S[i])
            end = first + int(query_starts[i + 1]) - start
            places_M, parts_of_row = row.embedded(first, end)
            places.append(places_M + (start - first))
            parts += parts_of_row
            if positions_AT is not None and row.positions_AP is not None:
                of_prompt = row.positions_AP[:, first:end]
                positions_AT[:, start : start + of_prompt.shape[1]] = of_prompt
        embedded = EmbeddedTokens(places_M=np.concatenate(places).astype(np.int64), parts=parts) if parts else None
        return StepItems(embedded=embedded, positions_AT=positions_AT)
