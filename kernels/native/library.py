"""The C functions of a set of kernels, as exports.h declares them."""

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_bool, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

from kernels.native.cores import num_usable_cores
from kernels.native.memory import WeightMemory
from kernels.native.paths import NativePath
from kernels.native.recording import CallStruct, KernelTimes, Op, Recording


class NativeKernelsError(RuntimeError):
    """Kernels that were built compute something else than the reference."""


class LinearStruct(ctypes.Structure):
    """`Linear` of kernels/linear/panels.h."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("gated", c_int32),
        ("weights", c_int32),
        ("activation", c_int32),
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


class RopeTurnsStruct(ctypes.Structure):
    """`RopeTurns` of kernels/rope/rope_turns.h."""

    _fields_ = (("frequencies", c_void_p), ("magnitude", c_float), ("pairs", c_int32))


class AttentionStepStruct(ctypes.Structure):
    """`AttentionStep` of kernels/paged_attention/attention.h."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("items", c_void_p),
        ("splits", c_void_p),
        ("table_stride", c_int64),
        ("num_items", c_int64),
        ("num_splits", c_int64),
        ("num_partials", c_int64),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_size", c_int32),
        ("block_size", c_int32),
        ("window", c_int32),
        ("attention_chunk", c_int32),
        ("bf16_cache", c_int32),
    )


class MlaStepStruct(ctypes.Structure):
    """`MlaStep` of kernels/mla_attention/mla_attention.h."""

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


class DecodeRowsStruct(ctypes.Structure):
    """`DecodeRows` of kernels/native/decode_rows.h."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("block_ids", c_void_p),
        ("num_blocks", c_void_p),
        ("num_tokens", c_void_p),
        ("num_prompt_tokens", c_void_p),
        ("num_computed_tokens", c_void_p),
        ("sequences", c_void_p),
        ("failed", c_void_p),
        ("num_rows", c_int64),
        ("token_stride", c_int64),
        ("block_stride", c_int64),
        ("block_size", c_int64),
        ("max_model_len", c_int64),
        ("batch_token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("logit_indices", c_void_p),
        ("most_rows", c_int64),
        ("table_stride", c_int64),
    )


class DrawsStruct(ctypes.Structure):
    """`Draws` of kernels/sampling/draw.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("rows", c_void_p),
        ("temperatures", c_void_p),
        ("uniforms", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("vocabulary", c_int64),
        ("count", c_int64),
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
        self._set_threads = _typed(functions.octavo_set_threads, c_int32, c_bool)
        self._set_cores = _typed(functions.octavo_set_cores, c_void_p, c_int32, result=c_int32)
        # (linear): columns of a panel of its packed weights.
        self.panel_width = _typed(functions.octavo_panel_width, c_void_p, result=c_int32)
        # (linear): bytes of its panels.
        self.packed_bytes = _typed(functions.octavo_packed_bytes, c_void_p, result=c_int64)
        # (linear, rows of weights, their scales and minima or null, panels of zeros)
        self.pack = _typed(functions.octavo_pack, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)
        # (step, q, cache, scale, out). Not recorded: nor are steps of models with it.
        self.mla_attention = _typed(functions.octavo_mla_attention, c_void_p, c_void_p, c_void_p, c_float, c_void_p)
        # (draws, tokens)
        self.draw = _typed(functions.octavo_draw, c_void_p, c_void_p)
        # (rows of a batch, those that decode, how many those are): see decode_rows.h, also for the result.
        self.begin_decodes = _typed(functions.octavo_begin_decodes, c_void_p, c_char_p, c_int64, result=c_int64)
        # (the same, tokens, their logits, and what is said of them: sequences, positions, token ids)
        self.end_decodes = _typed(
            functions.octavo_end_decodes, c_void_p, c_char_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p,
            result=c_bool,
        )  # fmt: skip
        self._embedding = _typed(
            functions.octavo_embedding, c_void_p, c_int64, c_void_p, c_int64, c_float, c_void_p, c_int32
        )
        self._zero = _typed(functions.octavo_zero, c_void_p, c_int64, c_int64)
        self._add_rms_norm = _typed(
            functions.octavo_add_rms_norm, c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p
        )
        self._rope_turns = _typed(functions.octavo_rope_turns, c_void_p, c_void_p, c_int64, c_void_p)
        self._plan_attention = _typed(functions.octavo_plan_attention, c_void_p, c_int64, c_int64)
        self._linear = _typed(functions.octavo_linear, c_void_p, c_void_p, c_int64, c_void_p, c_int32)
        self._linear_argmax = _typed(functions.octavo_linear_argmax, c_void_p, c_void_p, c_int64, c_void_p, c_void_p)
        self._rope_cache_write = _typed(
            functions.octavo_rope_cache_write, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p
        )
        self._attention = _typed(functions.octavo_attention, c_void_p, c_void_p, c_int64, c_void_p, c_float, c_void_p)
        self._replay = _typed(functions.octavo_replay, c_void_p, c_int64, c_int64, c_void_p)
        self._recording: Recording | None = None
        self._times: KernelTimes | None = None

    def set_threads(self, count: int) -> None:
        """How many compute, the caller's included. They spin between calls if there is a core for each."""
        self._set_threads(count, count <= num_usable_cores())

    def bind_threads(self, cores: Sequence[int]) -> None:
        """Binds the calling thread to the first of the cores, and the set's to the next ones; if there are more threads
        than cores, they begin again. Raises OSError."""
        error = self._set_cores((c_int32 * len(cores))(*cores), len(cores))
        if error:
            raise OSError(error, os.strerror(error))

    def linear(self, linear: int, x: int, rows: int, y: int, epilogue: int) -> None:
        """y [rows, outputs] from x. epilogue: whether to add to y."""
        call = CallStruct(op=Op.LINEAR, variant=epilogue, operation=linear, input=x, output=y)
        with self._observed(call):
            self._linear(linear, x, rows, y, epilogue)

    def linear_argmax(self, linear: int, x: int, rows: int, ids: int, values: int) -> None:
        """Of each row's largest output: its column and itself."""
        call = CallStruct(op=Op.LINEAR, operation=linear, input=x, output=ids, largest=values)
        with self._observed(call):
            self._linear_argmax(linear, x, rows, ids, values)

    def rope_cache_write(self, shape: int, qkv: int, rows: int, turns: int, slots: int, cache: int) -> None:
        call = CallStruct(
            op=Op.ROPE_CACHE_WRITE, operation=shape, input=qkv, turns=turns, numbers=slots, cache=cache
        )  # fmt: skip
        with self._observed(call):
            self._rope_cache_write(shape, qkv, rows, turns, slots, cache)

    def attention(self, step: int, q: int, stride: int, cache: int, scale: float, out: int) -> None:
        """stride: floats between tokens of q."""
        call = CallStruct(
            op=Op.ATTENTION, operation=step, input=q, size=stride, cache=cache, scale=scale, output=out
        )  # fmt: skip
        with self._observed(call):
            self._attention(step, q, stride, cache, scale, out)

    def embedding(self, ids: int, tokens: int, table: int, size: int, scale: float, out: int, *, is_bf16: bool) -> None:
        """size: numbers of a token. is_bf16: those of the table."""
        call = CallStruct(
            op=Op.EMBEDDING, variant=is_bf16, input=table, size=size, scale=scale, numbers=ids, output=out
        )  # fmt: skip
        with self._observed(call):
            self._embedding(ids, tokens, table, size, scale, out, is_bf16)

    def zero(self, x: int, rows: int, size: int) -> None:
        """x [rows, size] becomes zeros."""
        with self._observed(CallStruct(op=Op.ZERO, output=x, size=size)):
            self._zero(x, rows, size)

    def add_rms_norm(self, x: int, weight: int, eps: float, rows: int, size: int, y: int) -> None:
        """Adds the norm of x [rows, size] to y."""
        with self._observed(CallStruct(op=Op.ADD_RMS_NORM, operation=weight, input=x, size=size, scale=eps, output=y)):
            self._add_rms_norm(x, weight, eps, rows, size, y)

    def rope_turns(self, rope: int, positions: int, tokens: int, turns: int) -> None:
        with self._observed(CallStruct(op=Op.ROPE_TURNS, operation=rope, numbers=positions, output=turns)):
            self._rope_turns(rope, positions, tokens, turns)

    def plan_attention(self, step: int, tokens: int, tile_rows: int) -> None:
        """Makes the step's list of work. tile_rows: query heads of a tile."""
        with self._observed(CallStruct(op=Op.PLAN_ATTENTION, operation=step, size=tile_rows)):
            self._plan_attention(step, tokens, tile_rows)

    def replay(self, recording: Recording, num_tokens: int) -> None:
        """Makes recorded calls again, with so many tokens."""
        recording.run(num_tokens, self._times)

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """What is called within the `with` block is done, and recorded: all ops but draw."""
        assert self._recording is None, "recordings are never nested"
        self._recording = recording = Recording(self._replay)
        try:
            yield recording
        finally:
            self._recording = None

    @contextmanager
    def measuring(self) -> Iterator[KernelTimes]:
        """What ops but draw take within the `with` block, replayed or not."""
        assert self._times is None, "measurements are never nested"
        self._times = times = KernelTimes()
        try:
            yield times
        finally:
            self._times = None

    @contextmanager
    def _observed(self, call: CallStruct) -> Iterator[None]:
        if self._recording is not None:
            self._recording.append(call)
        start = time.perf_counter()
        yield
        if self._times is not None:
            self._times.add(Op(call.op), call.operation, time.perf_counter() - start)


def _typed(
    function: "ctypes._NamedFuncPointer", *arguments: type, result: type | None = None
) -> "ctypes._NamedFuncPointer":
    function.argtypes = arguments
    function.restype = result
    return function
