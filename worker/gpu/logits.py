"""A step's logits on the device: whole, or this rank's part, and of the others' as much as a step needs.

Shape suffixes: L scored positions, V vocabulary, P a rank's part of it (the last rank's may be smaller).
"""

from typing import Protocol, cast

import torch

from kernels.backend import Backend
from kernels.linear.residual import Residual


class LogitsModel(Protocol):
    """A model that computes them."""

    path: Backend

    def logits(self, hidden: Residual, /, out: torch.Tensor) -> torch.Tensor:
        """[L, V] of the compute dtype, in `out`."""
        ...


class DividedVocabulary(Protocol):
    """What such a model does if several ranks share its vocabulary."""

    def write_part_of_logits(self, hidden: Residual, /, out_LP: torch.Tensor) -> None: ...
    def gather_logits(self, part_LP: torch.Tensor, /, out_LV: torch.Tensor) -> None: ...
    def likeliest(self, part_LP: torch.Tensor, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the whole vocabulary: int64 ids [L], and their float32 logits [L], see kernels.sampling.triton.greedy."""
        ...


class StepLogits:
    """In memory that stays in place: what chooses tokens, in a graph, reads it there."""

    def __init__(self, model: LogitsModel, num_positions: int, vocab_size: int) -> None:
        """num_positions: whose logits exist at once."""
        path = model.path
        self._model, self._divided = model, None
        self._whole_LV = torch.empty(num_positions, vocab_size, dtype=path.compute_dtype, device=path.device)
        self._part_LP = self._whole_LV
        if path.shard.size > 1:
            self._divided = cast(DividedVocabulary, model)
            width = -(-vocab_size // path.shard.size)
            # Zeros, for the last rank sends all of it.
            self._part_LP = torch.zeros(num_positions, width, dtype=path.compute_dtype, device=path.device)

    def __len__(self) -> int:
        return len(self._whole_LV)

    @property
    def are_divided(self) -> bool:
        return self._divided is not None

    def write(self, hidden: Residual, size: int) -> None:
        """Of the first `size` positions, as far as this rank computes them."""
        if self._divided is not None:
            self._divided.write_part_of_logits(hidden, self._part_LP[:size])
            return
        logits_LV = self._whole_LV[:size]
        written = self._model.logits(hidden, out=logits_LV)
        # Graphs that choose tokens would go on with those of an earlier step.
        assert written.data_ptr() == logits_LV.data_ptr(), "the model put its logits elsewhere"

    def gather(self, size: int) -> None:
        """Makes `whole` of what all ranks have written."""
        if self._divided is not None:
            self._divided.gather_logits(self._part_LP[:size], self._whole_LV[:size])

    def whole(self, size: int) -> torch.Tensor:
        """[size, V], always in the same memory; of divided ones those that were gathered last."""
        return self._whole_LV[:size]

    def likeliest(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of divided ones, without gathering them: int64 ids [size], and their float32 logits, which are not finite if
        one of the position's is not."""
        assert self._divided is not None
        return self._divided.likeliest(self._part_LP[:size])
