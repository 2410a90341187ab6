"""MLA by the C++ kernel, mla_attention.h beside this file."""

import ctypes
from ctypes import c_int32, c_int64, c_void_p

import numpy as np
import torch

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
        ("bf16_cache", c_int32),
    )


class NativeMlaPlan:
    """The attention of one step after the other."""

    def __init__(self, kernels: NativeKernels, shape: LatentShape) -> None:
        assert shape.latent_size % 8 == shape.rope_size % 8 == 0
        self._kernels, self._shape = kernels, shape
        self._struct = MlaStepStruct(
            heads=shape.num_heads, latent_size=shape.latent_size, rope_size=shape.rope_size
        )  # fmt: skip
        # What the struct points to.
        self._arrays: tuple[np.ndarray, ...] = ()

    def update(
        self,
        *,
        query_starts: np.ndarray,
        context_lens: np.ndarray,
        block_tables: np.ndarray,
        block_size: int,
        cache_dtype: torch.dtype,
    ) -> None:
        """From here on it is the plan of another step. Arguments as of `MlaPlanner.plan`; rows of the tables may lie
        apart."""
        assert query_starts.dtype == context_lens.dtype == block_tables.dtype == np.int32
        assert query_starts.strides == context_lens.strides == block_tables.strides[1:] == (4,)
        struct, self._arrays = self._struct, (query_starts, context_lens, block_tables)
        struct.query_starts = query_starts.ctypes.data
        struct.context_lens = context_lens.ctypes.data
        struct.block_tables = block_tables.ctypes.data
        struct.table_stride = block_tables.strides[0] // 4
        struct.num_rows = len(context_lens)
        struct.block_size = block_size
        struct.bf16_cache = cache_dtype is torch.bfloat16

    def attend(
        self,
        q_THD: torch.Tensor,
        cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
        kv_scales: KVScales | None = None,
    ) -> torch.Tensor:
        """As torch_plan.TorchMlaPlan, of float32 and contiguous tensors."""
        assert kv_scales is None
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
