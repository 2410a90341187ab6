"""A step's logits on the device: whole, or this rank's part, and of the others' as much as a step needs.

Shape suffixes: L scored positions, V vocabulary, P a rank's part of it (the last rank's may be smaller).
"""

import torch

from kernels.linear.residual import Residual
from worker.gpu.executor import GpuModel


class StepLogits:
    """In memory that stays in place: what chooses tokens, in a graph, reads it there."""

    def __init__(self, model: GpuModel, num_positions: int, vocab_size: int) -> None:
        """num_positions: whose logits exist at once."""
        backend = model.backend
        self._model, self.are_divided = model, backend.shard.size > 1
        self._whole_LV = torch.empty(num_positions, vocab_size, dtype=backend.compute_dtype, device=backend.device)
        self._part_LP = self._whole_LV
        if self.are_divided:
            width = -(-vocab_size // backend.shard.size)
            # Zeros, for the last rank sends all of it.
            self._part_LP = torch.zeros(num_positions, width, dtype=backend.compute_dtype, device=backend.device)

    def __len__(self) -> int:
        return len(self._whole_LV)

    def write(self, hidden: Residual, size: int) -> None:
        """Of the first `size` positions, as far as this rank computes them."""
        if self.are_divided:
            self._model.write_part_of_logits(hidden, self._part_LP[:size])
            return
        logits_LV = self._whole_LV[:size]
        written = self._model.logits(hidden, out=logits_LV)
        # Graphs that choose tokens would go on with those of an earlier step.
        assert written.data_ptr() == logits_LV.data_ptr(), "the model put its logits elsewhere"

    def gather(self, size: int) -> None:
        """Makes `whole` of what all ranks have written."""
        if self.are_divided:
            self._model.gather_logits(self._part_LP[:size], self._whole_LV[:size])

    def whole(self, size: int) -> torch.Tensor:
        """[size, V], always in the same memory; of divided ones those that were gathered last."""
        return self._whole_LV[:size]

    def likeliest(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of divided ones, without gathering them: int64 ids [size], and their float32 logits, which are not finite if
        one of the position's is not."""
        assert self.are_divided
        return self._model.likeliest(self._part_LP[:size])
