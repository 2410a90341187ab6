"""Layers that carry a state from token to token, kept in the sequence's blocks: Mamba-2 and the gated delta rule, by
C++ or by PyTorch."""

from collections.abc import Callable

import torch

from kernels.attention.plan import StepRows
from kernels.attention.recurrent.native import NativeLayer, NativeStep
from kernels.attention.recurrent.reference import RecurrentWeights, recurrent
from kernels.attention.recurrent.shape import RecurrentShape, Rule
from kernels.backend import Backend


class RecurrentStep:
    """The rows of a step, shared by its layers; updated in place."""

    def __init__(self, backend: Backend) -> None:
        self.native = None if backend.native is None else NativeStep()
        self.rows: StepRows | None = None

    def update(self, rows: StepRows) -> None:
        """Makes this the step of these rows."""
        self.rows = rows
        if self.native is not None:
            self.native.update(rows)


class RecurrentLayer:
    """One layer: convolution, recurrence, gated norm.

    Legend: T tokens, F numbers of an input, C padded channels, O numbers of a result.
    """

    def __init__(self, shape: RecurrentShape, weights: RecurrentWeights, backend: Backend) -> None:
        assert backend.gpu is None, "recurrent layers are computed on CPUs only"
        self.shape, self._weights = shape, weights
        self._native = None if backend.native is None else NativeLayer(shape, weights, backend.native)

    def __call__(
        self, x_TF: torch.Tensor, cache: torch.Tensor, step: RecurrentStep, take: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Returns the results [T, O], and advances the states of the step's rows. x_TF: as recurrent.h describes it,
        contiguous. cache: float32 [blocks, shape.slot]. take: makes memory, see worker.layers.forward_context."""
        if self._native is None:
            assert step.rows is not None
            return recurrent(self.shape, self._weights, x_TF.float(), cache, step.rows).to(x_TF.dtype)
        assert step.native is not None
        out_TO = take("recurrent results", len(x_TF), self.shape.results)
        mixed_TC = take("convolved", len(x_TF), self.shape.padded_channels)
        self._native(x_TF, cache, step.native, mixed_TC, out_TO)
        return out_TO


__all__ = ["RecurrentLayer", "RecurrentShape", "RecurrentStep", "RecurrentWeights", "Rule"]
