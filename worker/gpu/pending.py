"""A step that the device has been given."""

from typing import Protocol

from worker.gpu.device import Event
from worker.gpu.step_inputs import StepOutputs


class PendingStep(Protocol):
    event: Event

    @property
    def is_done(self) -> bool:
        """Whether the device has finished it, so that `wait` returns at once."""
        ...

    def wait(self) -> StepOutputs:
        """Blocks until then. The outputs are the same however often it is called."""
        ...
