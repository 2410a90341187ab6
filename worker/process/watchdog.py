"""Ends this process when a step never returns: there is no other way to interrupt a kernel that hangs."""

import faulthandler
import logging
import os
import time

from protos import step_pb2
from runtime.awake_time import AwakeTime
from runtime.telemetry.logs import flush_logs
from worker.process.loop import EXIT_FAILED
from worker.process.status import WorkerStatus

_log = logging.getLogger("octavo.worker")

# The scheduler gives up a step after step_timeout. If the step returns a little later, the weights stay loaded.
_LONGEST_GRACE_S = 10.0


class Watchdog:
    """Detects hanging steps. A thread other than the one that computes calls `check` repeatedly."""

    def __init__(self, status: WorkerStatus, step_timeout: float) -> None:
        self._status, self._step_timeout = status, step_timeout
        self._limit = step_timeout + min(step_timeout, _LONGEST_GRACE_S)

    def check(self, awake: AwakeTime) -> None:
        """Ends the process if the oldest step in flight has lasted too long, after printing all threads' stacks.

        awake: when this process stood still; a step can't return then.
        """
        now = self._status.snapshot()
        seconds = awake.seconds(now.since, time.monotonic())
        if now.state != step_pb2.WORKER_STATE_STEPPING or seconds <= self._limit:
            return
        _log.critical(
            "step %d has not returned for %.1f s (step_timeout=%g): it hangs, and this process ends. Its threads:",
            now.oldest_step, seconds, self._step_timeout,
        )  # fmt: skip
        if flush_logs():
            faulthandler.dump_traceback()
        os._exit(EXIT_FAILED)
