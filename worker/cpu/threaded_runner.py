"""A runner whose steps are computed on a thread of its own: a pipeline stage on CPUs.

Whoever begins steps takes the next plan meanwhile, and what the other stages send for it begins to come before its turn
does.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from protos import step_pb2
from worker.cpu.runner import Runner
from worker.cpu.stage_traffic import ExpectedStep
from worker.errors import PlanError, StepError
from worker.parallel.groups import Groups


class ThreadedRunner:
    """A worker.step.runner.StepRunner."""

    def __init__(self, runner: Runner, *, max_steps_in_flight: int) -> None:
        """max_steps_in_flight: steps that may have begun without their results having been taken."""
        self._runner, self._max_steps_in_flight = runner, max_steps_in_flight
        self.model_info, self.num_swap_blocks = runner.model_info, runner.num_swap_blocks
        self._groups: Groups | None = None
        self._in_flight: deque[ThreadedResult] = deque()
        # A step has failed, or its results are wanted no more: nothing is computed until the next reset.
        self._is_over = False
        # It stays on the cores of the thread that calls it first.
        self._thread = ThreadPoolExecutor(1, "steps")

    @property
    def num_live_rows(self) -> int:
        return self._runner.num_live_rows

    def begin(self, plan: step_pb2.StepPlan) -> "ThreadedResult":
        if len(self._in_flight) >= self._max_steps_in_flight:
            raise PlanError(
                f"step: {plan.step} comes while {len(self._in_flight)} results are awaited; max_steps_in_flight is "
                f"{self._max_steps_in_flight}: give all processes the same options"
            )
        future = self._thread.submit(self._execute, plan, self._runner.expect(plan))
        result = ThreadedResult(self, future)
        self._in_flight.append(result)
        return result

    def join(self, groups: Groups | None, while_waiting: Callable[[], None] = lambda: None) -> None:
        """See worker.step.runner.StepRunner. None: waits for the step under way, which fails if it waits for a rank
        that has died or left."""
        self._is_over = self._is_over or groups is None
        if groups is None and self._groups is not None:
            self._groups.leave()
        self._groups = groups
        self._thread.submit(self._runner.join, groups).result()

    def reset(self) -> None:
        self._is_over = True
        self._in_flight.clear()
        self._thread.submit(self._runner.reset).result()
        self._is_over = False

    def take(self, result: "ThreadedResult") -> step_pb2.StepResult:
        """Waits for the step and says what it gave. Raises whatever made it fail."""
        assert self._in_flight, "no result is awaited; a reset has dropped it"
        assert self._in_flight[0] is result, "results are taken in the order of the steps"
        step_result = result.future.result()
        self._in_flight.popleft()
        return step_result

    def _execute(self, plan: step_pb2.StepPlan, expected: ExpectedStep | None) -> step_pb2.StepResult:
        """On the thread."""
        if self._is_over:
            raise StepError(f"step {plan.step} is not computed: one before it has failed, or the epoch is over")
        try:
            return self._runner.execute(plan, expected)
        except BaseException:
            self._is_over = True
            raise


class ThreadedResult:
    """A worker.step.runner.PendingResult."""

    __slots__ = ("_runner", "future")

    def __init__(self, runner: ThreadedRunner, future: Future[step_pb2.StepResult]) -> None:
        self._runner, self.future = runner, future

    @property
    def is_done(self) -> bool:
        return self.future.done()

    def result(self) -> step_pb2.StepResult:
        return self._runner.take(self)

    def call_when_done(self, callback: Callable[[], None]) -> None:
        self.future.add_done_callback(lambda _: callback())
