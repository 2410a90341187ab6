"""The progress of a worker: of its loop, and of its steps. Nothing but its end interrupts a kernel that hangs."""

from protos import step_pb2
from runtime.awake_time import AwakeTime
from runtime.progress.watchdog import LoopProgress, Stillness
from worker.process.status import WorkerStatus

# The scheduler gives up a step after step_timeout. If the step returns a little later, the weights stay loaded.
_LONGEST_GRACE_S = 10.0
_STEPPING = step_pb2.WORKER_STATE_STEPPING
_LOADING = (step_pb2.WORKER_STATE_LOADING, step_pb2.WORKER_STATE_COMPILING)


class WorkerProgress:
    """A runtime.progress.watchdog.Progress. It is not judged while it loads or waits for other ranks, which may take
    any time."""

    def __init__(self, status: WorkerStatus, *, step_timeout: float, hang_timeout: float) -> None:
        self._status, self._step_timeout = status, step_timeout
        self._step_bound_s = step_timeout + min(step_timeout, _LONGEST_GRACE_S)
        self._loop = LoopProgress("the worker's loop", hang_timeout)

    def stillness(self, now: float, awake: AwakeTime) -> Stillness | None:
        status = self._status.snapshot()
        self._loop.turns = self._status.num_turns
        if status.state in _LOADING:
            return None
        if status.state != _STEPPING:
            return self._loop.stillness(now, awake)
        return Stillness(
            what=f"step {status.oldest_step} has not returned",
            seconds=awake.seconds(status.since, now),
            bound_s=self._step_bound_s,
            option=f"step_timeout={self._step_timeout:g}",
        )
