"""The device's state of every permanent row: its block table and its last token.

Freeing a row changes nothing here: a new row overwrites all entries that it will read.

Shape suffixes: R permanent rows, B blocks of a row's table.
"""

import torch

from kernels.step_inputs.triton import write_tables
from worker.device.staging import Part, StepSlot
from worker.step.inputs import StepInputs

# Rows, places and block ids, on their way to the device.
StagedTables = tuple[Part, Part, Part]


class DeviceRows:
    def __init__(self, device: torch.device, *, max_num_seqs: int, max_blocks: int) -> None:
        """max_blocks: the most blocks of a row."""
        self.block_tables_RB = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self.last_tokens_R = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)

    def stage(self, inputs: StepInputs, slot: StepSlot) -> StagedTables | None:
        """Stages a step's changes, if there are any."""
        if (changes := inputs.table_changes) is None:
            return None
        return slot.add(changes.rows_C), slot.add(changes.places_C), slot.add(changes.block_ids_C)

    def apply(self, changes: StagedTables | None) -> None:
        """Writes staged changes to the tables; call it after the step is sent."""
        if changes is not None:
            write_tables(self.block_tables_RB, *(part.tensor for part in changes))
