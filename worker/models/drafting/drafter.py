"""The interface of drafters in workers: what a runner asks of them, on a CPU or on a GPU."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from worker.step.batch import InputBatch

Drafts = dict[int, list[int]]


class Drafter(Protocol):
    """Proposes the tokens that may come next. Its proposals change no output: the model verifies them.

    In each step: `note_plan`, then the model computes and samples, then `note_step`, then `propose`, if the plan asks
    for drafts.
    """

    # What Ready announces: the method of speculative_config and its model.
    name: str

    @property
    def swapped_layers(self) -> Sequence[torch.Tensor]:
        """KV by the model's block numbers (dim 0) that the drafter can't compute again from tokens: it is swapped out
        and in, and zeroed, with the model's."""
        ...

    def note_plan(self) -> None:
        """Takes the plan that was just applied to the rows; none of its tokens counts as computed yet."""
        ...

    def note_step(self, batch: InputBatch, rows_S: np.ndarray) -> None:
        """Takes the step that the model has just computed, on a CPU: its batch and rows, which have sampled already."""
        ...

    def drop_blocks(self, blocks: np.ndarray) -> None:
        """Blocks that get the KV of the model from elsewhere: swapped in, or zeroed because it was not finite."""
        ...

    def propose(self, wanted: Sequence[tuple[int, int]]) -> Drafts:
        """Returns drafts by row. wanted: rows that have sampled in this step, distinct, with the most drafts of each.
        Rows may get fewer drafts, or none."""
        ...

    def reset(self) -> None:
        """Starts a new epoch: forgets every row and block."""
        ...
