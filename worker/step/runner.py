"""The interface between what computes steps and its callers: a worker's loop, or octavo.local.engine in one process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from protos import inference_pb2, step_pb2

if TYPE_CHECKING:
    # It imports torch; a worker does that only after its heartbeats have started.
    from worker.parallel.groups import Groups


class PendingResult(Protocol):
    """A step that was begun. The caller takes each result once, in the order of the plans."""

    @property
    def is_done(self) -> bool:
        """True if `result` returns at once. Raises what `result` would raise, if that is known."""
        ...

    def result(self) -> step_pb2.StepResult:
        """Waits until the step is done. Raises the error that made it fail."""
        ...

    def call_when_done(self, callback: Callable[[], None]) -> None:
        """Calls callback once, when the step is done or has failed: immediately, or later on another thread."""
        ...


@dataclass(slots=True)
class DoneResult:
    """The PendingResult of a runner that computes a step in `begin`."""

    step_result: step_pb2.StepResult

    @property
    def is_done(self) -> bool:
        return True

    def result(self) -> step_pb2.StepResult:
        return self.step_result

    def call_when_done(self, callback: Callable[[], None]) -> None:
        callback()


# worker.encoders.items.Items alone, which imports torch and PIL: see Groups above.
class PreparesItems(Protocol):
    """The part of an encoder's items that a worker's loop needs: it makes the encoder's inputs, beside the steps."""

    @property
    def cache_size(self) -> int:
        """Embeddings that the rank keeps."""
        ...

    def prepare(self, message: step_pb2.ItemToEncode, when_done: Callable[[], None]) -> None:
        """Queues an item. when_done: called on another thread once `take_done` has an answer. Raises PlanError."""
        ...

    def take_seconds(self) -> float:
        """Returns the seconds that encoding took since the last call; on a GPU, to launch it."""
        ...

    @property
    def num_input_bytes(self) -> int:
        """Bytes of the inputs that are kept."""
        ...

    def take_done(self) -> list[tuple[int, str]]:
        """Returns the items that are done and not yet returned: each one's number, and why it can't be encoded; empty:
        it can."""
        ...


class StepRunner(Protocol):
    """One rank's model, KV cache and rows: worker.cpu.runner.Runner on a CPU, worker.gpu.runner.GpuRunner on a GPU."""

    model_info: inference_pb2.ModelInfo

    # True if a sequence with a constraint may be in only one step in flight; see step_pb2.Ready.
    holds_constrained: bool

    @property
    def num_swap_blocks(self) -> int: ...

    @property
    def items(self) -> "PreparesItems | None":
        """Prepares images and videos. None: this rank encodes none."""
        ...

    @property
    def drafter(self) -> str:
        """The drafter that this rank has: the method of speculative_config and its model. Empty: none."""
        ...

    @property
    def num_live_rows(self) -> int:
        """Rows that hold a sequence after the latest plan."""
        ...

    def begin(self, plan: step_pb2.StepPlan) -> PendingResult:
        """Begins the next step; earlier steps may still be in flight.

        The caller checks epoch, step number and digest. Raises PlanError if the plan contradicts what the rows hold:
        results of earlier steps can still be taken, and then only `reset` may follow.
        """
        ...

    def reset(self) -> None:
        """Starts a new epoch: waits for steps in flight, drops their results, and forgets every row."""
        ...

    def join(self, groups: "Groups | None", while_waiting: Callable[[], None] = lambda: None) -> None:
        """Sets the groups of ranks for the next steps; None leaves the present ones, where other ranks that wait for
        this one then fail. while_waiting: called repeatedly while a rank on a GPU, which captures its graphs here,
        waits for the others; may raise."""
        ...
