"""Runs an engine in a process of its own, and measures the memory that it takes."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from benchmarks.peers.engines import EngineSpec

INTERVAL = 1.0


class MemoryPeak:
    """The largest sum of the processes' PSS (pages that several share are counted once), sampled each second.

    A sample walks the page tables, a few ms for some GiB.
    """

    def __init__(self, pid: int) -> None:
        self._parent = psutil.Process(pid)
        self._peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-peak", daemon=True)

    def __enter__(self) -> "MemoryPeak":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def mib(self) -> int:
        return round(self._peak / 2**20)

    def _sample(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._peak = max(self._peak, _tree_pss(self._parent))


def _tree_pss(parent: psutil.Process) -> int:
    """PSS of a process and its descendants, in bytes."""
    try:
        return sum(_pss(process.pid) for process in (parent, *parent.children(recursive=True)))
    except psutil.NoSuchProcess:
        return 0


def _pss(pid: int) -> int:
    """PSS of one process, in bytes; 0 if it has ended meanwhile."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


# Seconds for a start or a measurement: vLLM's start took 190 on busy cores.
TIMEOUT = 600.0


class EngineFailedError(RuntimeError):
    """An engine ended, took too long, or did not do the requested work."""


@dataclass(frozen=True, slots=True)
class Answer:
    seconds: float
    # Further fields of the engine's answer.
    extra: dict[str, Any]


class EngineProcess:
    """An engine's process: entering waits until it is ready, leaving ends it."""

    def __init__(self, spec: EngineSpec, log: int, timeout: float = TIMEOUT) -> None:
        """log: a file descriptor for its stderr. timeout: seconds for a start or a measurement, after which it is
        killed."""
        self._spec, self._timeout = spec, timeout
        start = time.monotonic()
        self._process = subprocess.Popen(
            spec.command,
            env={**os.environ, **spec.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        self._memory = MemoryPeak(self._process.pid)
        self._started = start
        self.settings: dict[str, Any] = {}
        self.start_seconds = 0.0
        self._is_late = False

    def __enter__(self) -> "EngineProcess":
        self._memory.__enter__()
        try:
            self.settings = self._read()["settings"]
        except BaseException:
            self._end()
            raise
        self.start_seconds = time.monotonic() - self._started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    @property
    def peak_mib(self) -> int:
        return self._memory.mib

    def run(self, prompts: Sequence[Sequence[int]], output: int, *, shared: int = 0) -> Answer:
        """Runs greedy requests that begin together, of `output` tokens each. shared: the number of first tokens that
        all prompts have in common. Raises EngineFailedError."""
        assert self._process.stdin is not None
        try:
            print(
                json.dumps({"prompts": prompts, "output": output, "shared": shared}),
                file=self._process.stdin,
                flush=True,
            )
        except BrokenPipeError:
            raise self._ended() from None
        answer = self._read()
        seconds, tokens = answer.pop("seconds"), answer.pop("tokens")
        if tokens != len(prompts) * output:
            raise EngineFailedError(f"{self._spec.name} gave {tokens} tokens, not {len(prompts)} x {output}")
        return Answer(seconds, answer)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(self._timeout, self._end_late)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> EngineFailedError:
        code = self._process.wait()
        if self._is_late:
            return EngineFailedError(f"{self._spec.name} took more than {self._timeout:g} s; --timeout allows more")
        return EngineFailedError(f"{self._spec.name} ended with exit code {code}; --log FILE keeps its output")

    def _end(self) -> None:
        """Closes the runner's input, which ends it; kills it if it has not ended after 30 s."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._memory.__exit__(None, None, None)
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        self._process.stdout.close()

    def _end_late(self) -> None:
        self._is_late = True
        self._kill()

    def _kill(self) -> None:
        """Kills the process and its children."""
        for process in (*psutil.Process(self._process.pid).children(recursive=True), self._process):
            process.kill()
