"""What the simulator asks of a model of costs."""

from collections.abc import Sequence
from typing import Protocol

from octavo.plan.step_shape import StepShape


class CostModel(Protocol):
    """Seconds of a step, from what it computes. Two kinds: `fitted` to measured steps, and `roofline`."""

    @property
    def parts(self) -> tuple[str, ...]:
        """What a step's time is made of, in words for people."""
        ...

    @property
    def num_stages(self) -> int:
        """Of the pipeline. A step passes through one after another, and each can hold a step of its own."""
        ...

    @property
    def host_seconds(self) -> float:
        """Time of the scheduler around a step, during which the device works only on other steps in flight."""
        ...

    def stage_seconds(self, shape: StepShape) -> Sequence[float]:
        """Seconds that each part takes on one stage of the pipeline."""
        ...
