"""A step's logits on the device: whole, or this rank's part, gathered from all ranks only if a step needs it.

Shape suffixes: L scored positions, V vocabulary, P a rank's part of it (the last rank's may be smaller).
"""

import torch

from kernels.linear.residual import Residual
from worker.gpu.executor import GpuModel


class StepLogits:
    """Logits in memory at fixed addresses, where graphs that choose tokens read them."""

    def __init__(self, model: GpuModel, num_positions: int, vocab_size: int) -> None:
        """num_positions: positions whose logits exist at once."""
        backend = model.backend
        self._model, self.are_divided = model, backend.shard.size > 1
        self._whole_LV = torch.empty(num_positions, vocab_size, dtype=backend.compute_dtype, device=backend.device)
        self._part_LP = self._whole_LV
        if self.are_divided:
            width = -(-vocab_size // backend.shard.size)
            # Zeros: the last rank's part may be narrower, but all of this is sent.
            self._part_LP = torch.zeros(num_positions, width, dtype=backend.compute_dtype, device=backend.device)

    def __len__(self) -> int:
        return len(self._whole_LV)

    def write(self, hidden: Residual, size: int) -> None:
        """Writes the logits of `size` positions, or this rank's part of them."""
        if self.are_divided:
            self._model.write_part_of_logits(hidden, self._part_LP[:size])
            return
        logits_LV = self._whole_LV[:size]
        written = self._model.logits(hidden, out=logits_LV)
        # Otherwise graphs that choose tokens would read the logits of an earlier step.
        assert written.data_ptr() == logits_LV.data_ptr(), "the model put its logits elsewhere"

    def gather(self, size: int) -> None:
        """Fills `whole` with what all ranks have written."""
        if self.are_divided:
            self._model.gather_logits(self._part_LP[:size], self._whole_LV[:size])

    def whole(self, size: int) -> torch.Tensor:
        """Returns the logits [size, V], always in the same memory; if divided, those that were gathered last."""
        return self._whole_LV[:size]

    def likeliest(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the likeliest tokens of divided logits without gathering those: int64 ids [size], and their float32
        logits, not finite if any of the position's logits is not."""
        assert self.are_divided
        return self._model.likeliest(self._part_LP[:size])
