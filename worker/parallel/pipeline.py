"""The stages of a model, as one of their ranks sees them."""

from typing import Protocol

import torch


class Transfer(Protocol):
    """Of a tensor, from one stage to another. The tensor is in use until `wait` has returned."""

    def wait(self) -> None:
        """Until it has been sent, or has come. Raises CollectiveError."""
        ...


class PipelineLink(Protocol):
    """Between the ranks of one place in all stages. A sender and a receiver name the same step and channel, once each;
    in which order they begin and finish their transfers is open. Calls come from several threads."""

    stage: int
    num_stages: int
    # Begun last, for messages.
    step: int

    def send(self, x: torch.Tensor, stage: int, *, step: int, channel: int) -> Transfer:
        """Begins to send x, contiguous. channel: 0 or 1. Raises CollectiveError."""
        ...

    def receive(self, into: torch.Tensor, stage: int, *, step: int, channel: int) -> Transfer:
        """Begins to receive a tensor of into's size. Raises CollectiveError."""
        ...

    def leave(self) -> None:
        """Transfers that are under way here and at the other stages fail, and so do later ones."""
        ...


class _Done:
    def wait(self) -> None:
        pass


class RehearsedPipeline:
    """A stage without the others: for a warm-up, whose results mean nothing."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage, self.num_stages, self.step = stage, num_stages, 0

    def send(self, x: torch.Tensor, stage: int, *, step: int, channel: int) -> Transfer:
        return _Done()

    def receive(self, into: torch.Tensor, stage: int, *, step: int, channel: int) -> Transfer:
        into.zero_()
        return _Done()

    def leave(self) -> None:
        pass
