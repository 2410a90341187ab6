"""Has another process check and compile constraints, within bounds of time and memory."""

import importlib.util
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from protos.inference_pb2 import Constraint
from runtime.grammar.compiling.messages import REFUSED, SIZE, write_message
from runtime.grammar.engine import (
    COMPILE_MIB,
    COMPILE_SECONDS,
    ConstraintCompiler,
    ConstraintError,
    EngineError,
    OverBoundError,
)

# Python and the library, on a busy machine.
_START_SECONDS = 60.0
# A killed process.
_END_SECONDS = 10.0
# Between the end of its pipe and its own.
_GOING_SECONDS = 1.0
# Between two looks at its CPU time, which grows in steps of 10 ms.
_LOOK_S = 0.02
# Seconds that it may wait for a processor, for each second that it may compute.
_PATIENCE = 10.0
_LIBRARY = "llguidance"
_HINT = "use fewer or smaller repetitions and alternatives"


class _Gone(Exception):
    pass


class _Killed(_Gone):
    """Not by this process."""


class _OutOfTime(Exception):
    pass


@dataclass(slots=True)
class Compiler(ConstraintCompiler):
    """Safe to use from several threads; they take turns.

    A process that is out of bounds is killed, and the next one is started at once: it takes half a second, which the
    next constraint should not wait for.
    """

    # As a Vocabulary takes them, which is made in the other process: here it would hold the interpreter's lock.
    directory: Path
    vocab_size: int
    eos_token_ids: Sequence[int]
    # The bounds. seconds: of CPU time, so that a busy machine refuses nothing that it would otherwise compile.
    seconds: float = COMPILE_SECONDS
    mib: int = COMPILE_MIB
    _process: subprocess.Popen[bytes] | None = None
    # The process has said that it has begun to read.
    _is_ready: bool = False
    # Why there can be no answers; empty: there can.
    _problem: str = ""
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def canonical(self, constraint: Constraint) -> Constraint:
        """Returns the canonical form. Raises ConstraintError if it can't be compiled, OverBoundError if not within the
        bounds, EngineError if none can be compiled for this model."""
        with self._turn:
            try:
                answer = self._ask_again_if_killed(constraint.SerializeToString())
            except _OutOfTime:
                self._renew()
                raise OverBoundError(f"it takes more than {self.seconds:g} s to compile: {_HINT}") from None
            except _Gone:
                self._renew()
                raise OverBoundError(
                    f"it takes more than {self.mib} MiB of memory, or too deep a stack, to compile: {_HINT}"
                ) from None
        if answer[:1] == REFUSED:
            raise ConstraintError(answer[1:].decode())
        return Constraint.FromString(answer[1:])

    def _ask_again_if_killed(self, message: bytes) -> bytes:
        try:
            return self._ask(message)
        except _Killed:
            # By an operator, or by a kernel without memory: not necessarily for this constraint.
            return self._ask(message)

    def _ask(self, message: bytes) -> bytes:
        """Returns the answer to a constraint. Raises _OutOfTime or _Gone, and ends the process then."""
        process = self._ready()
        assert process.stdin is not None
        try:
            write_message(process.stdin, message)  # type: ignore[arg-type]
            return self._answer(process, _PATIENCE * self.seconds, cpu_seconds=self.seconds)
        except (_Gone, OSError) as error:
            # A pipe breaks before its process has ended.
            ended = _waited(process)
            self._end()
            raise (_Killed if ended == -signal.SIGKILL else _Gone)() from error
        except BaseException:
            # An answer that nobody reads would be taken for the next one's.
            self._end()
            raise

    def close(self) -> None:
        with self._turn:
            self._end()

    def _ready(self) -> subprocess.Popen[bytes]:
        if not self._problem and importlib.util.find_spec(_LIBRARY) is None:
            self._problem = f"the Python package {_LIBRARY} is not installed"
        if self._problem:
            raise EngineError(self._problem)
        process = self._process or self._start()
        if not self._is_ready:
            try:
                self._problem = self._answer(process, _START_SECONDS).decode()
            except (_Gone, _OutOfTime) as error:
                self._end()
                raise RuntimeError("the process that compiles constraints does not start") from error
            if self._problem:
                self._end()
                raise EngineError(self._problem)
            self._is_ready = True
        return process

    def _renew(self) -> None:
        self._end()
        self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        eos = ",".join(map(str, self.eos_token_ids))
        given = (self.directory, self.vocab_size, eos, _PATIENCE * self.seconds, self.mib)
        command = [sys.executable, "-m", f"{__package__}.checking", *map(str, given)]
        # Threads take address space, which is bounded there.
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}
        self._process = process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        return process

    def _end(self) -> None:
        process, self._process, self._is_ready = self._process, None, False
        if process is not None:
            process.kill()
            process.wait(timeout=_END_SECONDS)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                # What it did not read any more is lost.
                with suppress(OSError):
                    pipe.close()

    def _answer(self, process: subprocess.Popen[bytes], seconds: float, *, cpu_seconds: float | None = None) -> bytes:
        """cpu_seconds: None: no bound."""
        assert process.stdout is not None
        until, data, wanted = time.monotonic() + seconds, b"", SIZE.size
        cpu_until = None if cpu_seconds is None else _cpu_time(process) + cpu_seconds
        descriptor = process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while len(data) < wanted:
                left = until - time.monotonic()
                if cpu_until is not None:
                    # It can't compute for longer than time passes.
                    left = min(left, max(cpu_until - _cpu_time(process), _LOOK_S))
                if not selector.select(max(left, 0)):
                    if time.monotonic() >= until or (cpu_until is not None and _cpu_time(process) >= cpu_until):
                        raise _OutOfTime
                    continue
                more = os.read(descriptor, wanted - len(data))
                if not more:
                    raise _Gone
                data += more
                if len(data) == SIZE.size == wanted:
                    wanted += SIZE.unpack(data)[0]
        return data[SIZE.size :]


def _cpu_time(process: subprocess.Popen[bytes]) -> float:
    """Raises _Gone."""
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        raise _Gone from None
    return times.user + times.system


def _waited(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a process that is about to end; None: it goes on."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=_GOING_SECONDS)
    return None
