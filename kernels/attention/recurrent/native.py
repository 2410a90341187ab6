"""Layers with a state by the C++ kernel, recurrent.h beside this file."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
import torch.nn.functional as F

from kernels.attention.plan import StepRows
from kernels.attention.recurrent.reference import RecurrentWeights
from kernels.attention.recurrent.shape import RecurrentShape
from kernels.native.library import NativeKernels

_RULES = ("mamba2", "delta")


class _StepStruct(ctypes.Structure):
    """`RecurrentStep` of recurrent.h."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("block_size", c_int32),
        ("cache_type", c_int32),
    )


class _LayerStruct(ctypes.Structure):
    """`RecurrentLayer` of recurrent.h."""

    _fields_ = (
        ("step", c_void_p),
        ("taps", c_void_p),
        ("bias", c_void_p),
        ("rate", c_void_p),
        ("step_bias", c_void_p),
        ("skip", c_void_p),
        ("norm", c_void_p),
        ("rule", c_int32),
        ("heads", c_int32),
        ("groups", c_int32),
        ("key_size", c_int32),
        ("value_size", c_int32),
        ("num_taps", c_int32),
        ("norm_size", c_int32),
        ("eps", c_float),
        ("least_step", c_float),
        ("most_step", c_float),
    )


class NativeStep:
    """The rows of a step, updated in place: addresses in a recording stay valid."""

    def __init__(self) -> None:
        self._struct = _StepStruct()
        # Keeps alive what the struct points to.
        self._rows: StepRows | None = None

    @property
    def address(self) -> int:
        return ctypes.addressof(self._struct)

    def update(self, rows: StepRows) -> None:
        self._rows = rows
        rows.fill(self._struct)


class NativeLayer:
    """One layer's weights, as the kernel reads them."""

    def __init__(self, shape: RecurrentShape, weights: RecurrentWeights, kernels: NativeKernels) -> None:
        padding = shape.padded_channels - shape.channels
        bias_C = torch.zeros(shape.channels) if weights.bias_C is None else weights.bias_C
        tensors = {
            "taps": F.pad(weights.taps_WC, (0, padding)),
            "bias": F.pad(bias_C, (0, padding)),
            "rate": weights.rate_H,
            "step_bias": weights.step_bias_H,
            "norm": weights.norm,
        }
        if weights.skip_H is not None:
            tensors["skip"] = weights.skip_H
        self._kernels, self._shape = kernels, shape
        self._tensors = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
        self._struct = _LayerStruct(
            rule=_RULES.index(shape.rule),
            heads=shape.num_heads,
            groups=shape.num_groups,
            key_size=shape.key_size,
            value_size=shape.value_size,
            num_taps=shape.num_taps,
            norm_size=shape.norm_size,
            eps=weights.eps,
            least_step=weights.steps[0],
            most_step=weights.steps[1],
            **{name: tensor.data_ptr() for name, tensor in self._tensors.items()},
        )

    def __call__(
        self, x_TF: torch.Tensor, cache: torch.Tensor, step: NativeStep, mixed_TC: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Advances the states in `cache` by the step's tokens, and writes the results into `out`."""
        shape, num_tokens = self._shape, len(x_TF)
        assert x_TF.shape == (num_tokens, shape.width)
        assert out.shape == (num_tokens, shape.results)
        assert mixed_TC.shape == (num_tokens, shape.padded_channels)
        assert cache.shape[1:] == (shape.slot,)
        for tensor in (x_TF, cache, mixed_TC, out):
            assert tensor.dtype is torch.float32
            assert tensor.is_contiguous()
        self._struct.step = step.address
        self._kernels.recurrent(
            ctypes.addressof(self._struct),
            x_TF.data_ptr(),
            num_tokens,
            cache.data_ptr(),
            mixed_TC.data_ptr(),
            out.data_ptr(),
        )
