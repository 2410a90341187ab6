"""Progress of a worker: turns of its loop, changes of its state, and the oldest step's return."""

from protos import step_pb2
from runtime.awake_time import AwakeTime
from runtime.progress.watchdog import Stillness
from worker.process.status import WorkerProgress, WorkerStatus


class Worker:
    """A worker's status, and the judgement of it after some seconds."""

    def __init__(self) -> None:
        self.status = WorkerStatus()
        self._progress = WorkerProgress(self.status, step_timeout=100.0, hang_timeout=20.0)
        self._awake = AwakeTime(1000.0)

    def judge_after(self, seconds: float) -> Stillness | None:
        """seconds: since the last change of state."""
        return self._progress.stillness(self.status.snapshot().since + seconds, self._awake)

    def after(self, seconds: float) -> Stillness:
        found = self.judge_after(seconds)
        assert found is not None
        return found


def test_the_oldest_step_is_judged_and_only_from_its_turn_on():
    worker = Worker()
    worker.status.begin_step(6)
    worker.status.begin_step(7)
    found = worker.after(50.0)
    assert (found.what, round(found.seconds, 3), found.bound_s) == ("step 6 has not returned", 50.0, 110.0)
    worker.status.end_step()
    found = worker.after(50.0)
    assert (found.what, round(found.seconds, 3)) == ("step 7 has not returned", 50.0)


def test_a_loop_that_waits_in_turns_is_well_and_one_that_does_not_is_not():
    worker = Worker()
    worker.status.set(step_pb2.WORKER_STATE_IDLE)
    for seconds in (0.0, 15.0, 30.0):
        worker.status.turn()
        assert worker.after(seconds).seconds == 0.0
    found = worker.after(45.0)
    assert (str(found), found.bound_s) == ("the worker's loop has made no progress for 15.0 s (hang_timeout=20)", 20.0)


def test_a_step_within_one_turn_is_no_standstill_when_it_has_returned():
    worker = Worker()
    worker.status.set(step_pb2.WORKER_STATE_IDLE)
    assert worker.after(0.0).seconds == 0.0
    worker.status.begin_step(1)
    assert worker.after(99.0).bound_s == 110.0
    worker.status.end_step()
    assert worker.after(99.0).seconds == 0.0


def test_loading_and_waiting_for_other_ranks_may_take_any_time():
    worker = Worker()
    for state in (step_pb2.WORKER_STATE_LOADING, step_pb2.WORKER_STATE_COMPILING):
        worker.status.set(state)
        assert worker.judge_after(1e6) is None
