"""Head norms, rope and cache write by the C++ kernel: rope_cache_write.h beside this file."""

import ctypes
from ctypes import c_float, c_int32, c_void_p

import torch

from kernels.kv_cache.layout import CPU_CACHE_TYPES, KVScales
from kernels.native.library import NativeKernels


class RopeCacheWriteStruct(ctypes.Structure):
    """`RopeCacheWrite` of kernels/kv_cache/write/rope_cache_write.h."""

    _fields_ = (
        ("head_norm", c_void_p),
        ("eps", c_float),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_size", c_int32),
        ("block_size", c_int32),
        ("cache_type", c_int32),
        ("k_scale", c_float),
        ("v_scale", c_float),
    )


class NativeRopeCacheWrite:
    """RopeCacheWrite with C++ kernels."""

    __slots__ = ("_head_norm_HD", "_kernels", "_shape", "_struct")

    def __init__(
        self,
        kernels: NativeKernels,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        head_norm_HD: torch.Tensor | None,
        eps: float,
        kv_scales: KVScales | None,
    ) -> None:
        self._kernels = kernels
        self._shape = (num_heads, head_size)
        self._head_norm_HD = None if head_norm_HD is None else head_norm_HD.float().contiguous()
        self._struct = RopeCacheWriteStruct(
            head_norm=None if self._head_norm_HD is None else self._head_norm_HD.data_ptr(),
            eps=eps,
            heads=num_heads,
            kv_heads=num_kv_heads,
            head_size=head_size,
            k_scale=1.0 if kv_scales is None else kv_scales.k.item(),
            v_scale=1.0 if kv_scales is None else kv_scales.v.item(),
        )

    def __call__(
        self, qkv_TF: torch.Tensor, cos_sin_T1P: torch.Tensor, cache: torch.Tensor, slots_T: torch.Tensor
    ) -> torch.Tensor:
        assert qkv_TF.dtype is torch.float32
        assert qkv_TF.is_contiguous()
        assert cos_sin_T1P.dtype is torch.complex64
        assert cos_sin_T1P.is_contiguous()
        assert slots_T.dtype is torch.int64
        num_heads, head_size = self._shape
        self._struct.block_size = cache.shape[1]
        self._struct.cache_type = CPU_CACHE_TYPES[cache.dtype]
        self._kernels.rope_cache_write(
            ctypes.addressof(self._struct),
            qkv_TF.data_ptr(),
            len(qkv_TF),
            cos_sin_T1P.data_ptr(),
            slots_T.data_ptr(),
            cache.data_ptr(),
        )
        return qkv_TF.view(len(qkv_TF), -1, head_size)[:, :num_heads]
