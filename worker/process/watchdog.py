"""Ends this process when a step never returns: a kernel that hangs can't be interrupted otherwise."""

import faulthandler
import logging
import os
import time

from protos import step_pb2
from worker.process.loop import EXIT_FAILED
from worker.process.status import WorkerStatus

_log = logging.getLogger("octavo.worker")

# The scheduler gives a step up after step_timeout. One that returns a little later saves loading the weights again.
_LONGEST_GRACE_S = 10.0


class Watchdog:
    """Another thread than the one that computes asks it to `check`, again and again."""

    def __init__(self, status: WorkerStatus, step_timeout: float) -> None:
        self._status, self._step_timeout = status, step_timeout
        self._limit = step_timeout + min(step_timeout, _LONGEST_GRACE_S)

    def check(self) -> None:
        """Does not return if the oldest step in flight has lasted too long; says where the threads are then."""
        now = self._status.snapshot()
        seconds = time.monotonic() - now.since
        if now.state != step_pb2.WORKER_STATE_STEPPING or seconds <= self._limit:
            return
        _log.critical(
            "step %d has not returned for %.1f s (step_timeout=%g): it hangs, and this process ends. Its threads:",
            now.oldest_step, seconds, self._step_timeout,
        )  # fmt: skip
        faulthandler.dump_traceback()
        os._exit(EXIT_FAILED)
