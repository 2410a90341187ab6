"""What the step loop needs of the gRPC side."""

from typing import Protocol

from protos import inference_pb2


class Front(Protocol):
    """Called on the step loop's thread; must not block."""

    def deliver(self, batch: list[tuple[int, list[bytes]]]) -> None:
        """Serialized SchedulerMessages, by Session."""
        ...

    def workers_changed(self, model: inference_pb2.ModelInfo | None) -> None:
        """model: what is served; None while the workers are away."""
        ...

    def ended(self, cause: str | None) -> None:
        """The loop is over: None if it was asked to end."""
        ...
