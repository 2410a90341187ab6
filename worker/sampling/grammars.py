"""The matchers of a worker's grammar engine, and the threads that compute masks beside the forward pass."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Not imported at run time: code for GPUs must also run without protobuf.
    from protos.inference_pb2 import SamplingParams
    from runtime.grammar.engine import Matcher
    from runtime.grammar.llguidance_engine import LlguidanceEngine

_MOST_THREADS = 4
# The least work of a thread, in seconds. A mask takes 4 us where its states are known and there are 49,152 tokens, and
# more around it with the interpreter's lock: two threads take three times the CPU time of one for 64 such masks
# (measured). Masks of 50 us are divided.
_LEAST_WORK = 2e-3


class Grammars:
    """Makes matchers, and runs what they compute on threads of its own. The first matcher waits for the engine: a
    worker that never gets a constraint does not make one."""

    def __init__(
        self,
        make_engine: "Callable[[], LlguidanceEngine]",
        *,
        version: str,
        num_threads: int = 1,
        cores: Sequence[int] = (),
    ) -> None:
        """version: the engine's, known before it is made. cores: those that the threads may run on; empty: any. The
        thread that makes the pool is bound to one of them, and new threads would be, too."""
        self.version = version
        self._make_engine = make_engine
        self._engine: LlguidanceEngine | None = None
        self._making = threading.Lock()
        self._num_threads = max(1, min(num_threads, _MOST_THREADS))
        # The time that jobs take, as a running mean.
        self._seconds_per_job = 0.0
        self._pool = ThreadPoolExecutor(self._num_threads, "masks", initializer=_run_on, initargs=(cores,))

    def matcher(self, sampling: "SamplingParams", output: Sequence[int]) -> "Matcher":
        """Returns the matcher of a request's constraint and thinking budget after some output. Raises ConstraintError,
        or another error of the engine."""
        # Imported here: code for GPUs must also run without protobuf.
        from runtime.grammar.engine import ThinkingBudget

        constraint = sampling.constraint if sampling.HasField("constraint") else None
        with self._making:
            if self._engine is None:
                self._engine = self._make_engine()
        return self._engine.matcher(constraint, output, thinking=ThinkingBudget.of(sampling))

    def start(self, jobs: Sequence[Callable[[], None]]) -> list[Future[None]]:
        """Starts jobs, which raise nothing, divided among the threads where they take long. Returns each one's future;
        several may share it."""
        if not jobs:
            return []
        num_parts = max(1, min(self._num_threads, int(len(jobs) * self._seconds_per_job / _LEAST_WORK)))
        futures: list[Future[None]] = []
        for part in range(num_parts):
            share = jobs[len(jobs) * part // num_parts : len(jobs) * (part + 1) // num_parts]
            futures += [self._pool.submit(self._run, share)] * len(share)
        return futures

    def _run(self, jobs: Sequence[Callable[[], None]]) -> None:
        start = time.thread_time()
        for job in jobs:
            job()
        # Threads may lose an update: the mean only divides work.
        self._seconds_per_job += ((time.thread_time() - start) / len(jobs) - self._seconds_per_job) / 8


def _run_on(cores: Sequence[int]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
