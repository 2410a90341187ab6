"""The kernel calls of a forward pass, kept with their arguments, so that they can run again without Python in between.

A decode step of a small model makes some two hundred calls, each of which takes about as long to make from Python as
the smaller ones take to compute.
"""

import ctypes
import enum
from collections import defaultdict
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from typing import Protocol

import numpy as np


class Op(enum.IntEnum):
    LINEAR = 0
    ROPE_CACHE_WRITE = 1
    ATTENTION = 2
    EMBEDDING = 3
    ROPE_TURNS = 4
    PLAN_ATTENTION = 5
    ZERO = 6
    ADD_RMS_NORM = 7


class CallStruct(ctypes.Structure):
    """`Call` of kernels/native/replay.h."""

    _fields_ = (
        ("op", c_int32),
        ("variant", c_int32),
        ("operation", c_void_p),
        ("input", c_void_p),
        ("output", c_void_p),
        ("cache", c_void_p),
        ("turns", c_void_p),
        ("numbers", c_void_p),
        ("largest", c_void_p),
        ("size", c_int64),
        ("scale", c_float),
    )


class KernelTimes:
    """What calls took, by op and the address of the struct that says what is computed."""

    def __init__(self) -> None:
        self._seconds: defaultdict[tuple[Op, int], float] = defaultdict(float)
        # Added up when they are asked for: that must not count in what is measured.
        self._replayed: list[tuple[list[CallStruct], np.ndarray]] = []

    @property
    def seconds(self) -> dict[tuple[Op, int], float]:
        for calls, taken in self._replayed:
            for call, seconds in zip(calls, taken.tolist(), strict=True):
                self._seconds[Op(call.op), call.operation] += seconds
        self._replayed.clear()
        return self._seconds

    def of(self, op: Op) -> float:
        """Seconds, all calls together."""
        return sum(seconds for (each, _), seconds in self.seconds.items() if each is op)

    def add(self, op: Op, operation: int, seconds: float) -> None:
        self._seconds[op, operation] += seconds

    def add_replayed(self, calls: list[CallStruct], seconds: np.ndarray) -> None:
        """seconds: float64, of each call."""
        self._replayed.append((calls, seconds))


class ReplayFunction(Protocol):
    """`octavo_replay` of kernels/native/replay.h."""

    def __call__(self, calls: int, count: int, tokens: int, seconds: int | None, /) -> None: ...


class Recording:
    """What was called, in order. What the calls point to must stay where it is as long as they are made again."""

    def __init__(self, replay: ReplayFunction) -> None:
        self._replay = replay
        self._calls: list[CallStruct] = []
        # The calls as an array, once they are made again, and its address.
        self._array: ctypes.Array[CallStruct] | None = None
        self._address = 0

    def append(self, call: CallStruct) -> None:
        self._calls.append(call)
        self._array = None

    def run(self, num_tokens: int, times: KernelTimes | None = None) -> None:
        """Makes the calls again, with so many tokens."""
        if self._array is None:
            self._array = (CallStruct * len(self._calls))(*self._calls)
            self._address = ctypes.addressof(self._array)
        if times is None:
            self._replay(self._address, len(self._calls), num_tokens, None)
            return
        seconds = np.zeros(len(self._calls), np.dtype(c_double))
        self._replay(self._address, len(self._calls), num_tokens, seconds.ctypes.data)
        times.add_replayed(self._calls, seconds)
