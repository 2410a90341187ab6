"""What one plan changes in the rows, for a device that has a copy of them.

Shape suffixes: C changed entries.
"""

from dataclasses import dataclass, field

import numpy as np

from worker.gpu.step_inputs import RowSampling, TableChanges


@dataclass(slots=True)
class RowChanges:
    """In the order in which plans are applied: rows that were freed, then rows that were filled, then tables."""

    freed_rows: list[int] = field(default_factory=list)
    # That these held.
    freed_sequences: list[int] = field(default_factory=list)
    new_rows: list[RowSampling] = field(default_factory=list)
    # (rows, places, block ids) of entries that were written, int64, distinct in themselves.
    _tables: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)

    def free(self, row: int, sequence: int) -> None:
        self.freed_rows.append(row)
        self.freed_sequences.append(sequence)

    def write_table(self, rows_C: np.ndarray, places_C: np.ndarray, block_ids_C: np.ndarray) -> None:
        self._tables.append((rows_C, places_C, block_ids_C))

    def block_ids(self) -> np.ndarray:
        """All that were written, int64."""
        return np.concatenate([block_ids_C for _, _, block_ids_C in self._tables] or [np.empty(0, np.int64)])

    def table_changes(self) -> TableChanges | None:
        """None: no table was changed. Entries that were trimmed stay what they are: nothing reads them."""
        if not self._tables:
            return None
        rows_C, places_C, block_ids_C = (np.concatenate(columns) for columns in zip(*self._tables, strict=True))
        if len(self._tables) > 1:
            # What was filled, trimmed and grown in one plan was written twice.
            entries = np.stack((rows_C, places_C))[:, ::-1]
            last = len(rows_C) - 1 - np.unique(entries, axis=1, return_index=True)[1]
            rows_C, places_C, block_ids_C = rows_C[last], places_C[last], block_ids_C[last]
        return TableChanges(
            rows_C=rows_C.astype(np.int32),
            places_C=places_C.astype(np.int32),
            block_ids_C=block_ids_C.astype(np.int32),
        )
