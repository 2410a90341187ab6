"""What computes steps, as those see it who have steps to compute: a worker's loop, or octavo.local.engine in one
process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from protos import inference_pb2, step_pb2

if TYPE_CHECKING:
    # It imports torch, which a worker does once its heartbeats flow.
    from worker.parallel.groups import Groups


class PendingResult(Protocol):
    """A step that was begun. Results are taken in the order of the plans, each of them once."""

    @property
    def is_done(self) -> bool:
        """Whether `result` returns at once. Raises what `result` would raise, if that is known."""
        ...

    def result(self) -> step_pb2.StepResult:
        """Waits until the step is done. Raises whatever made it fail."""
        ...

    def call_when_done(self, callback: Callable[[], None]) -> None:
        """callback: called once, as soon as the step is done or has failed: at once, or later on another thread."""
        ...


@dataclass(slots=True)
class DoneResult:
    """Of a runner that computes when it begins."""

    step_result: step_pb2.StepResult

    @property
    def is_done(self) -> bool:
        return True

    def result(self) -> step_pb2.StepResult:
        return self.step_result

    def call_when_done(self, callback: Callable[[], None]) -> None:
        callback()


class StepRunner(Protocol):
    """One rank's model, KV cache and rows: worker.cpu.runner.Runner on a CPU, worker.gpu.runner.GpuRunner on a GPU."""

    model_info: inference_pb2.ModelInfo

    @property
    def num_swap_blocks(self) -> int: ...

    @property
    def num_live_rows(self) -> int:
        """Rows that hold a sequence after the plan begun last."""
        ...

    def begin(self, plan: step_pb2.StepPlan) -> PendingResult:
        """Begins the next step, whatever of the steps before it is still under way.

        Epoch, step number and digest are the caller's to check. Raises PlanError for a plan that contradicts what the
        rows hold: results of the steps before it can still be taken, and then only `reset` may follow.
        """
        ...

    def reset(self) -> None:
        """A new epoch: waits for steps that are under way, drops their results, and forgets every row."""
        ...

    def join(self, groups: "Groups | None", while_waiting: Callable[[], None] = lambda: None) -> None:
        """groups: whom this rank computes its steps with from here on. None: leaves those that it is in, whose other
        ranks fail if they wait for this one. while_waiting: called again and again while a rank on a GPU, which
        captures its graphs here, waits for the others; may raise."""
        ...
