"""What the device keeps of every permanent row: block table, last token, and how it samples.

A row that is freed leaves everything as it is: nobody reads it before a new row has overwritten what it reads itself.

Shape suffixes: R permanent rows, B blocks of a row's table, M new rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.sampling.triton import SamplingColumns
from kernels.step_inputs.triton import write_columns, write_tables
from worker.device.staging import Part, StepSlot
from worker.sampling.adjustments import RowSampling
from worker.step.inputs import StepInputs


@dataclass(frozen=True, slots=True)
class StagedRowChanges:
    """On their way to the device."""

    # Rows, places and block ids.
    tables: tuple[Part, Part, Part] | None
    # New rows, then their columns in the order of SamplingColumns.
    columns: tuple[Part, Sequence[Part]] | None


class DeviceRows:
    def __init__(self, device: torch.device, *, max_num_seqs: int, max_blocks: int) -> None:
        """max_blocks: of a row."""

        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_num_seqs, dtype=dtype, device=device)

        self.block_tables_RB = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self.last_tokens_R = column(torch.int32)
        self.columns = SamplingColumns(
            temperature_R=column(torch.float32),
            top_k_R=column(torch.int32),
            top_p_R=column(torch.float64),
            min_p_R=column(torch.float32),
            seed_R=column(torch.int64),
            choice_R=column(torch.int32),
        )

    def stage(self, inputs: StepInputs, slot: StepSlot) -> StagedRowChanges:
        """Takes a step's changes along."""
        tables, columns = None, None
        if (changes := inputs.table_changes) is not None:
            tables = slot.add(changes.rows_C), slot.add(changes.places_C), slot.add(changes.block_ids_C)
        if inputs.new_rows:
            rows_M = np.array([new.row for new in inputs.new_rows], np.int32)
            columns = slot.add(rows_M), [slot.add(column_M) for column_M in _columns(inputs.new_rows)]
        return StagedRowChanges(tables, columns)

    def apply(self, changes: StagedRowChanges) -> None:
        """Once they are sent."""
        if changes.tables is not None:
            write_tables(self.block_tables_RB, *(part.tensor for part in changes.tables))
        if changes.columns is not None:
            rows_M, columns = changes.columns
            new = dict(zip(SamplingColumns.__slots__, (part.tensor for part in columns), strict=True))
            write_columns(self.columns, rows_M.tensor, SamplingColumns(**new))


def _columns(new_rows: Sequence[RowSampling]) -> list[np.ndarray]:
    """In the order of SamplingColumns."""
    return [
        np.array([new.temperature for new in new_rows], np.float32),
        np.array([new.top_k for new in new_rows], np.int32),
        np.array([new.top_p for new in new_rows], np.float64),
        np.array([new.min_p for new in new_rows], np.float32),
        np.array([new.seed for new in new_rows], np.uint64).view(np.int64),
        np.array([new.choice for new in new_rows], np.uint32).view(np.int32),
    ]
