"""What the ranks' coordinator tells the step loop."""

from dataclasses import dataclass

from protos import inference_pb2, step_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBegun:
    """Every rank is ready for plans."""

    epoch: int
    # As all ranks have it; num_blocks is the least of theirs.
    model: inference_pb2.ModelInfo
    # Host blocks for swapped KV, the least of theirs.
    num_swap_blocks: int = 0
    # The epoch before was ended by ranks that failed, or have died: not by a connection that broke.
    after_failure: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnded:
    """What the ranks held is lost."""

    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReturned:
    result: step_pb2.StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Fatal:
    """This scheduler can't go on. permanent: nor could one that is started again (no such model, a corrupt file)."""

    cause: str
    permanent: bool


Event = EpochBegun | EpochEnded | StepReturned | Fatal
