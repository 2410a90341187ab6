"""MLA by the C++ kernel, mla_attention.h beside this file."""

import ctypes
from ctypes import c_int32, c_int64, c_void_p

import torch

from kernels.attention.plan import StepRows
from kernels.kv_cache.layout import KVScales, LatentShape
from kernels.native.library import NativeKernels


class MlaStepStruct(ctypes.Structure):
    """`MlaStep` of kernels/attention/latent/mla_attention.h."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("num_rows", c_int64),
        ("heads", c_int32),
        ("latent_size", c_int32),
        ("rope_size", c_int32),
        ("block_size", c_int32),
        ("cache_type", c_int32),
    )


class NativeMlaPlan:
    """The MLA plan of the C++ kernel, updated for each step."""

    def __init__(self, kernels: NativeKernels, shape: LatentShape) -> None:
        assert shape.latent_size % 8 == shape.rope_size % 8 == 0
        self._kernels, self._shape = kernels, shape
        self._struct = MlaStepStruct(heads=shape.num_heads, latent_size=shape.latent_size, rope_size=shape.rope_size)
        # Keeps alive what the struct points to.
        self._step: StepRows | None = None

    def reserve(self, *, num_queries: int, num_rows: int, context: int) -> None:
        """Does nothing: steps of models with MLA are not recorded."""

    def update(self, step: StepRows) -> None:
        """Makes this the plan of `step`."""
        self._step = step
        step.fill(self._struct)
        self._struct.num_rows = len(step.context_lens)

    def attend(
        self,
        q_THD: torch.Tensor,
        cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
        kv_scales: KVScales | None = None,
        soft_cap: float = 0.0,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See TorchMlaPlan. Tensors are contiguous, and queries float32."""
        assert kv_scales is None
        assert not soft_cap
        assert sinks_H is None
        shape = self._shape
        assert q_THD.dtype is torch.float32
        assert q_THD.is_contiguous()
        assert q_THD.shape[1:] == (shape.num_heads, shape.entry_size)
        assert cache.is_contiguous()
        out_THL = torch.empty(len(q_THD), shape.num_heads, shape.latent_size) if out is None else out
        assert out_THL.shape == (len(q_THD), shape.num_heads, shape.latent_size)
        assert out_THL.is_contiguous()
        self._kernels.mla_attention(
            ctypes.addressof(self._struct), q_THD.data_ptr(), cache.data_ptr(), scale, out_THL.data_ptr()
        )
        return out_THL
