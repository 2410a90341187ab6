"""Checks the C++ kernel of layers with a state against the reference, at load."""

from dataclasses import replace

import numpy as np
import torch

from kernels.attention.plan import StepRows
from kernels.attention.recurrent import RecurrentLayer, RecurrentShape, RecurrentStep, RecurrentWeights
from kernels.attention.recurrent.reference import recurrent
from kernels.backend import native_backend
from kernels.native.check import compare
from kernels.native.library import NativeKernels

_BLOCK_SIZE = 8
_MAMBA2 = RecurrentShape(rule="mamba2", num_heads=4, num_groups=2, key_size=5, value_size=11, num_taps=4, norm_size=22)


def check(kernels: NativeKernels) -> None:
    """Raises NativeKernelsError, naming the rule and the error, if results or states differ."""
    generator = torch.Generator().manual_seed(0)
    for shape in (_MAMBA2, replace(_MAMBA2, rule="delta", norm_size=11)):
        _check(kernels, shape, generator)


def _check(kernels: NativeKernels, shape: RecurrentShape, generator: torch.Generator) -> None:
    """A prompt of 21 tokens, one of 3, and then one more token of each; blocks hold garbage at first."""

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    heads, has_skip = shape.num_heads, shape.rule == "mamba2"
    weights = RecurrentWeights(
        taps_WC=random(shape.num_taps, shape.channels) / 2,
        bias_C=random(shape.channels),
        rate_H=-random(heads).exp(),
        step_bias_H=random(heads),
        skip_H=random(heads) if has_skip else None,
        norm=random(shape.results),
        eps=1e-5,
        steps=(0.25, 2.0) if has_skip else (0.0, float("inf")),
    )
    backend = native_backend(torch.float32, kernels)
    layer, step = RecurrentLayer(shape, weights, backend), RecurrentStep(backend)
    cache = random(5, shape.slot)
    plain = cache.double()
    tables = np.array([[3, 1, 4], [2, 0, 0]], np.int32)
    for starts, lengths in (([0, 21, 24], [21, 3]), ([0, 1, 2], [22, 4])):
        x_TF = random(starts[-1], shape.width)
        rows = StepRows(
            np.array(starts, np.int32), np.array(lengths, np.int32), tables, _BLOCK_SIZE, cache_dtype=torch.float32
        )
        step.update(rows)
        got = layer(x_TF, cache, step, lambda name, *size: torch.empty(size))
        expected = recurrent(shape, weights, x_TF.double(), plain, rows)
        compare(kernels, f"a recurrence ({shape.rule})", got, expected, 1e-4)
