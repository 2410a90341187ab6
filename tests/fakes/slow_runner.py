"""A runner like a GPU's: `begin` returns at once, and the test decides when steps are done."""

import threading
from collections.abc import Callable

from protos import inference_pb2, step_pb2
from tests.support.scheduler.steps import result_columns
from worker.errors import PlanError

# A plan with these decode_rows is refused.
REFUSED_ROWS = b"\xff\xff"


class SlowStep:
    """A step that is in flight until `finish`."""

    def __init__(self, plan: step_pb2.StepPlan) -> None:
        self._plan = plan
        self._done = threading.Event()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._callback: Callable[[], None] | None = None

    def finish(self, error: Exception | None = None) -> None:
        with self._lock:
            self._error = error
            self._done.set()
            callback = self._callback
        if callback is not None:
            callback()

    def wait(self) -> bool:
        return self._done.wait(60)

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def result(self) -> step_pb2.StepResult:
        assert self.wait(), f"step {self._plan.step} was never finished"
        if self._error is not None:
            raise self._error
        columns = result_columns([1], [self._plan.step], [self._plan.step])
        return step_pb2.StepResult(epoch=self._plan.epoch, step=self._plan.step, **columns)

    def call_when_done(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._callback = callback
            is_done = self._done.is_set()
        if is_done:
            callback()


class SlowRunner:
    """Keeps the steps that it was given; tests wait for them on other threads."""

    holds_constrained = False
    drafter = ""
    items = None

    def __init__(self) -> None:
        self.model_info = inference_pb2.ModelInfo(name="slow")
        self.num_swap_blocks = self.num_live_rows = 0
        # Set when a reset has begun and waits for steps.
        self.is_resetting = threading.Event()
        self._changed = threading.Condition()
        self._steps: list[SlowStep] = []
        self._under_way: list[SlowStep] = []

    def begin(self, plan: step_pb2.StepPlan) -> SlowStep:
        if plan.decode_rows == REFUSED_ROWS:
            raise PlanError("decode_rows: row 65535 does not exist")
        step = SlowStep(plan)
        with self._changed:
            self._steps.append(step)
            self._under_way.append(step)
            self._changed.notify_all()
        return step

    def join(self, groups: object | None, while_waiting: object = None) -> None:
        assert groups is None, "this runner has no groups"

    def reset(self) -> None:
        self.is_resetting.set()
        for step in self._under_way:
            assert step.wait(), "a reset waits for a step that the test never finishes"
        self._under_way.clear()

    def wait_for_steps(self, count: int) -> list[SlowStep]:
        """Waits for `count` steps, over all epochs; returns all that have begun so far."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._steps) >= count, 60), f"{len(self._steps)} steps were begun"
            return list(self._steps)
