"""Calls the C++ kernels through ctypes, and records calls for replay without Python.

A decode step of a small model makes about two hundred calls. Making one from Python takes as long as the smaller
kernels take to compute, so a step is recorded once and replayed.
"""

import ctypes
import enum
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_bool, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kernels.native.build import NativePath
from kernels.native.cores import num_usable_cores
from kernels.native.memory import WeightMemory


class Op(enum.IntEnum):
    LINEAR = 0
    ROPE_CACHE_WRITE = 1
    ATTENTION = 2
    EMBEDDING = 3
    COS_SIN_TABLE = 4
    PLAN_ATTENTION = 5
    ZERO = 6
    ADD_RMS_NORM = 7
    RECURRENT = 8
    NUM_TOKENS = 9


class CallStruct(ctypes.Structure):
    """`Call` of kernels/native/cpp/replay.h."""

    _fields_ = (
        ("op", c_int32),
        ("variant", c_int32),
        ("operation", c_void_p),
        ("input", c_void_p),
        ("output", c_void_p),
        ("cache", c_void_p),
        ("cos_sin", c_void_p),
        ("sinks", c_void_p),
        ("numbers", c_void_p),
        ("largest", c_void_p),
        ("size", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("value_scale", c_float),
        ("mixed", c_void_p),
    )


class KernelTimes:
    """The time that calls took, by op and the address of the struct that describes the operation, in the order of the
    first call of each."""

    def __init__(self) -> None:
        self._seconds: defaultdict[tuple[Op, int], float] = defaultdict(float)
        # Added up on demand, so that the measurement does not include it.
        self._replayed: list[tuple[list[CallStruct], np.ndarray]] = []

    @property
    def seconds(self) -> dict[tuple[Op, int], float]:
        for calls, taken in self._replayed:
            for call, seconds in zip(calls, taken.tolist(), strict=True):
                self._seconds[Op(call.op), call.operation] += seconds
        self._replayed.clear()
        return self._seconds

    def of(self, op: Op) -> float:
        """Seconds of all calls of an op together."""
        return sum(seconds for (each, _), seconds in self.seconds.items() if each is op)

    def add(self, op: Op, operation: int, seconds: float) -> None:
        self._seconds[op, operation] += seconds

    def add_replayed(self, calls: list[CallStruct], seconds: np.ndarray) -> None:
        """seconds: float64, one for each call."""
        self._replayed.append((calls, seconds))


class ReplayFunction(Protocol):
    """`octavo_replay` of kernels/native/cpp/replay.h."""

    def __call__(self, calls: int, count: int, tokens: int, seconds: int | None, /) -> None: ...


class Recording:
    """Recorded calls, in order. The memory that they point to must stay valid as long as they are replayed."""

    def __init__(self, replay: ReplayFunction) -> None:
        self._replay = replay
        self._calls: list[CallStruct] = []
        # The calls as an array, made at the first replay, and its address.
        self._array: ctypes.Array[CallStruct] | None = None
        self._address = 0

    def append(self, call: CallStruct) -> None:
        self._calls.append(call)
        self._array = None

    def run(self, num_tokens: int, times: KernelTimes | None = None) -> None:
        """Replays the calls with num_tokens tokens."""
        if self._array is None:
            self._array = (CallStruct * len(self._calls))(*self._calls)
            self._address = ctypes.addressof(self._array)
        if times is None:
            self._replay(self._address, len(self._calls), num_tokens, None)
            return
        seconds = np.zeros(len(self._calls), np.dtype(c_double))
        self._replay(self._address, len(self._calls), num_tokens, seconds.ctypes.data)
        times.add_replayed(self._calls, seconds)


class NativeKernelsError(RuntimeError):
    """The built kernels disagree with the reference."""


class NativeKernels:
    """A loaded library of kernels. Structs and tensors are passed by address: the caller keeps them alive and
    contiguous.

    Calls release the interpreter lock. One call runs at a time, on the library's threads.
    """

    def __init__(self, path: NativePath, library: Path) -> None:
        """Raises OSError if the library cannot be loaded."""
        functions = ctypes.CDLL(str(library))
        self.path = path
        self.weights = WeightMemory()
        self._set_threads = _typed(functions.octavo_set_threads, c_int32, c_bool)
        self._set_patience = _typed(functions.octavo_set_patience, c_bool)
        self._set_cores = _typed(functions.octavo_set_cores, c_void_p, c_int32, result=c_int32)
        # (linear): the columns of a panel of its packed weights.
        self.panel_width = _typed(functions.octavo_panel_width, c_void_p, result=c_int32)
        # (linear): the bytes of its panels; 0 if the path has no such weights.
        self.packed_bytes = _typed(functions.octavo_packed_bytes, c_void_p, result=c_int64)
        # (linear, rows of weights, their scales and minima or null, panels of zeros): False if its kind lacks room.
        self.pack = _typed(functions.octavo_pack, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, result=c_bool)
        # (step, q, cache, scale, out). Not recorded: steps of models with MLA never are.
        self.mla_attention = _typed(functions.octavo_mla_attention, c_void_p, c_void_p, c_void_p, c_float, c_void_p)
        # (starts, sequences, q, k, v, stride, heads, head size, scale, out). Not recorded: encoders never are.
        self.packed_attention = _typed(
            functions.octavo_packed_attention,
            c_void_p,
            c_int64,
            c_void_p,
            c_void_p,
            c_void_p,
            c_int64,
            c_int64,
            c_int64,
            c_float,
            c_void_p,
        )
        # (gates, count, x). Not recorded: steps of models with gated attention never are.
        self.multiply_by_sigmoid = _typed(functions.octavo_multiply_by_sigmoid, c_void_p, c_int64, c_void_p)
        # (draws, tokens)
        self.draw = _typed(functions.octavo_draw, c_void_p, c_void_p)
        # (all rows and the batch, the rows that decode): see decode_rows.h, also for the results.
        self.begin_decodes = _typed(functions.octavo_begin_decodes, c_void_p, c_void_p, result=c_int64)
        # (the same two, likeliest tokens, their logits, what rows have sampled)
        self.end_decodes = _typed(
            functions.octavo_end_decodes, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, result=c_int64
        )
        self._embedding = _typed(
            functions.octavo_embedding, c_void_p, c_int64, c_void_p, c_int64, c_float, c_void_p, c_int32
        )
        self._zero = _typed(functions.octavo_zero, c_void_p, c_int64, c_int64)
        self._add_rms_norm = _typed(
            functions.octavo_add_rms_norm, c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p
        )
        self._cos_sin_table = _typed(functions.octavo_cos_sin_table, c_void_p, c_void_p, c_int64, c_void_p)
        self._plan_attention = _typed(functions.octavo_plan_attention, c_void_p, c_int64, c_int64)
        self._linear = _typed(functions.octavo_linear, c_void_p, c_void_p, c_int64, c_void_p, c_int32)
        self._linear_argmax = _typed(
            functions.octavo_linear_argmax, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p
        )
        self._rope_cache_write = _typed(
            functions.octavo_rope_cache_write, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p
        )
        self._attention = _typed(
            functions.octavo_attention,
            c_void_p,
            c_void_p,
            c_int64,
            c_void_p,
            c_float,
            c_float,
            c_void_p,
            c_float,
            c_void_p,
        )
        self._recurrent = _typed(functions.octavo_recurrent, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p)
        self._replay = _typed(functions.octavo_replay, c_void_p, c_int64, c_int64, c_void_p)
        self._recording: Recording | None = None
        self._times: KernelTimes | None = None

    def set_threads(self, count: int) -> None:
        """Sets the number of threads, including the caller's. They spin between calls if there is a core for each."""
        self._set_threads(count, count <= num_usable_cores())

    def expect_pauses(self, *, are_long: bool) -> None:
        """Sets for how long threads spin. are_long: Python computes between the calls of a step, which are not
        replayed."""
        self._set_patience(are_long)

    def bind_threads(self, cores: Sequence[int]) -> None:
        """Binds the calling thread to the first of the cores, and the library's threads to the next ones, starting
        again if there are more threads than cores. Raises OSError."""
        error = self._set_cores((c_int32 * len(cores))(*cores), len(cores))
        if error:
            raise OSError(error, os.strerror(error))

    def linear(self, linear: int, x: int, rows: int, y: int, epilogue: int) -> None:
        """Computes y [rows, outputs] from x. epilogue: `Epilogue` of kernels/linear/outputs.h."""
        self._call(
            self._linear,
            (linear, x, rows, y, epilogue),
            op=Op.LINEAR,
            variant=epilogue,
            operation=linear,
            input=x,
            output=y,
        )

    def linear_argmax(self, linear: int, x: int, rows: int, ids: int, values: int) -> None:
        """Writes each row's largest output to values, and its column to ids."""
        self._call(
            self._linear_argmax,
            (linear, x, rows, ids, values, None),
            op=Op.LINEAR,
            operation=linear,
            input=x,
            output=ids,
            largest=values,
        )

    def masked_argmax(self, linear: int, x: int, rows: int, ids: int, values: int, masks: int) -> None:
        """Like linear_argmax, of the columns that masks leave: the address of rows' masks, each an address or 0 (any
        column). Not recorded: masks are new in each step."""
        assert self._recording is None
        self._call(self._linear_argmax, (linear, x, rows, ids, values, masks), op=Op.LINEAR, operation=linear)

    def rope_cache_write(self, shape: int, qkv: int, rows: int, cos_sin: int, slots: int, cache: int) -> None:
        self._call(
            self._rope_cache_write,
            (shape, qkv, rows, cos_sin, slots, cache),
            op=Op.ROPE_CACHE_WRITE,
            operation=shape,
            input=qkv,
            cos_sin=cos_sin,
            numbers=slots,
            cache=cache,
        )

    def attention(
        self,
        step: int,
        q: int,
        stride: int,
        cache: int,
        scale: float,
        soft_cap: float,
        sinks: int | None,
        value_scale: float,
        out: int,
    ) -> None:
        """stride: floats between tokens of q. sinks: float32, one for each head; None: there are none. value_scale:
        what values are multiplied by."""
        self._call(
            self._attention,
            (step, q, stride, cache, scale, soft_cap, sinks, value_scale, out),
            op=Op.ATTENTION,
            operation=step,
            input=q,
            size=stride,
            cache=cache,
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks,
            value_scale=value_scale,
            output=out,
        )

    def embedding(self, ids: int, tokens: int, table: int, size: int, scale: float, out: int, *, is_bf16: bool) -> None:
        """size: numbers of a token. is_bf16: True for a table in bf16, else float32."""
        self._call(
            self._embedding,
            (ids, tokens, table, size, scale, out, is_bf16),
            op=Op.EMBEDDING,
            variant=is_bf16,
            input=table,
            size=size,
            scale=scale,
            numbers=ids,
            output=out,
        )

    def zero(self, x: int, rows: int, size: int) -> None:
        """Sets x [rows, size] to zeros."""
        self._call(self._zero, (x, rows, size), op=Op.ZERO, output=x, size=size)

    def add_rms_norm(self, x: int, weight: int, eps: float, rows: int, size: int, y: int) -> None:
        """Adds the norm of x [rows, size] to y."""
        self._call(
            self._add_rms_norm,
            (x, weight, eps, rows, size, y),
            op=Op.ADD_RMS_NORM,
            operation=weight,
            input=x,
            size=size,
            scale=eps,
            output=y,
        )

    def cos_sin_table(self, rope: int, positions: int, tokens: int, cos_sin: int) -> None:
        self._call(
            self._cos_sin_table,
            (rope, positions, tokens, cos_sin),
            op=Op.COS_SIN_TABLE,
            operation=rope,
            numbers=positions,
            output=cos_sin,
        )

    def plan_attention(self, step: int, tokens: int, tile_rows: int) -> None:
        """Makes the step's list of work items. tile_rows: query heads of a tile."""
        self._call(
            self._plan_attention, (step, tokens, tile_rows), op=Op.PLAN_ATTENTION, operation=step, size=tile_rows
        )

    def recurrent(self, layer: int, x: int, tokens: int, cache: int, mixed: int, y: int) -> None:
        """Computes a layer with a state a sequence. mixed: memory for the convolved channels."""
        self._call(
            self._recurrent,
            (layer, x, tokens, cache, mixed, y),
            op=Op.RECURRENT,
            operation=layer,
            input=x,
            cache=cache,
            mixed=mixed,
            output=y,
        )

    def go_on_with(self, num_tokens: int) -> None:
        """In a recording, calls after this one compute as many tokens as there are at the address num_tokens (int64)
        when they are replayed. With none the replay ends."""
        self._call(_nothing, (), op=Op.NUM_TOKENS, numbers=num_tokens)

    def replay(self, recording: Recording, num_tokens: int) -> None:
        """Replays recorded calls with num_tokens tokens."""
        recording.run(num_tokens, self._times)

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Records the calls within the `with` block, which also execute: all ops but draw."""
        assert self._recording is None, "recordings are never nested"
        self._recording = recording = Recording(self._replay)
        try:
            yield recording
        finally:
            self._recording = None

    @contextmanager
    def measuring(self) -> Iterator[KernelTimes]:
        """Measures calls within the `with` block, replayed or not: all ops but draw."""
        assert self._times is None, "measurements are never nested"
        self._times = times = KernelTimes()
        try:
            yield times
        finally:
            self._times = None

    def _call(self, function: Callable[..., object], arguments: tuple[object, ...], **fields: Any) -> None:
        """Calls a kernel. fields: of the CallStruct that records it."""
        if self._recording is None and self._times is None:
            function(*arguments)
            return
        call = CallStruct(**fields)
        if self._recording is not None:
            self._recording.append(call)
        start = time.perf_counter()
        function(*arguments)
        if self._times is not None:
            self._times.add(Op(call.op), call.operation, time.perf_counter() - start)


def _nothing() -> None:
    pass


def _typed(
    function: "ctypes._NamedFuncPointer", *arguments: type, result: type | None = None
) -> "ctypes._NamedFuncPointer":
    function.argtypes = arguments
    function.restype = result
    return function
