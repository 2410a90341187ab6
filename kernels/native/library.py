"""The C functions of a set of kernels, as exports.h declares them."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path

from kernels.native.memory import WeightMemory
from kernels.native.paths import NativePath


class NativeKernelsError(RuntimeError):
    """Kernels that were built compute something else than the reference."""


class LinearStruct(ctypes.Structure):
    """`Linear` of kernels/linear/linear.h."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("gated", c_int32),
        ("bf16_weights", c_int32),
    )


class RopeCacheWriteStruct(ctypes.Structure):
    """`RopeCacheWrite` of kernels/rope_cache_write/rope_cache_write.h."""

    _fields_ = (
        ("head_norm", c_void_p),
        ("eps", c_float),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_size", c_int32),
        ("block_size", c_int32),
        ("bf16_cache", c_int32),
    )


class AttentionStepStruct(ctypes.Structure):
    """`AttentionStep` of kernels/paged_attention/attention.h."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("items", c_void_p),
        ("splits", c_void_p),
        ("partials", c_void_p),
        ("table_stride", c_int64),
        ("num_items", c_int64),
        ("num_splits", c_int64),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_size", c_int32),
        ("block_size", c_int32),
        ("window", c_int32),
        ("bf16_cache", c_int32),
    )


class NativeKernels:
    """A loaded set. Structs and tensors are passed by address: who calls keeps them alive and contiguous.

    Calls release the interpreter lock. One runs at a time, on the set's threads.
    """

    def __init__(self, path: NativePath, library: Path) -> None:
        """Raises OSError if the library cannot be loaded."""
        functions = ctypes.CDLL(str(library))
        self.path = path
        self.weights = WeightMemory()
        functions.octavo_panel_width.restype = c_int32
        # Columns of a panel of packed weights.
        self.panel_width: int = functions.octavo_panel_width()
        # (threads): how many compute, the caller's included.
        self.set_threads = _typed(functions.octavo_set_threads, c_int32)
        # (linear): bytes of its panels.
        self.packed_bytes = _typed(functions.octavo_packed_bytes, c_void_p, result=c_int64)
        # (linear, rows of weights, panels)
        self.pack = _typed(functions.octavo_pack, c_void_p, c_void_p, c_void_p)
        # (linear, x, rows of x, y, whether to add to y)
        self.linear = _typed(functions.octavo_linear, c_void_p, c_void_p, c_int64, c_void_p, c_int32)
        # (linear, x, rows of x, ids, values): of each row's largest output
        self.linear_argmax = _typed(
            functions.octavo_linear_argmax, c_void_p, c_void_p, c_int64, c_void_p, c_void_p
        )
        # (shape, qkv, tokens, turns, slots, cache)
        self.rope_cache_write = _typed(
            functions.octavo_rope_cache_write, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p
        )
        # (step, q, floats between tokens of q, cache, scale, out)
        self.attention = _typed(
            functions.octavo_attention, c_void_p, c_void_p, c_int64, c_void_p, c_float, c_void_p
        )


def _typed(
    function: "ctypes._NamedFuncPointer", *arguments: type, result: type | None = None
) -> "ctypes._NamedFuncPointer":
    function.argtypes = arguments
    function.restype = result
    return function
