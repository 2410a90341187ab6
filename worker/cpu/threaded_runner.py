"""A runner that computes its steps on a separate thread: a pipeline stage on CPUs.

Meanwhile the worker loop takes the next plan, and already begins to receive what other stages send for it.
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
    """A worker.step.runner.StepRunner that runs a `Runner` on its own thread."""

    holds_constrained = False

    def __init__(self, runner: Runner, *, max_steps_in_flight: int) -> None:
        """max_steps_in_flight: steps that may have begun without their results having been taken."""
        self._runner, self._max_steps_in_flight = runner, max_steps_in_flight
        self.model_info, self.num_swap_blocks = runner.model_info, runner.num_swap_blocks
        self.drafter, self.items = runner.drafter, runner.items
        self._groups: Groups | None = None
        self._in_flight: deque[ThreadedResult] = deque()
        # A step has failed, or its results are no longer wanted: nothing is computed until the next reset.
        self._is_over = False
        # Started by the first submit; it inherits the cores of the thread that calls it.
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
        """See worker.step.runner.StepRunner. If groups is None: waits for the step under way, which fails if it needs a
        rank that has died or left."""
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
        """Waits for the step and returns its result. Raises the error that made it fail."""
        assert self._in_flight, "no result is awaited; a reset has dropped it"
        assert self._in_flight[0] is result, "results are taken in the order of the steps"
        step_result = result.future.result()
        self._in_flight.popleft()
        return step_result

    def _execute(self, plan: step_pb2.StepPlan, expected: ExpectedStep | None) -> step_pb2.StepResult:
        """Computes a step; runs on the runner's thread."""
        if self._is_over:
            raise StepError(f"step {plan.step} is not computed: an earlier step failed, or the epoch is over")
        try:
            return self._runner.execute(plan, expected)
        except BaseException:
            self._is_over = True
            raise


class ThreadedResult:
    """A worker.step.runner.PendingResult of a ThreadedRunner."""

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
