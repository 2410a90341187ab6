"""What a policy sees of a replica, and what it decides."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """The latest Load of a replica, with what this router has submitted since added to it."""

    num_sequences: int
    num_queued_tokens: int
    # False while its workers are away: what it gets is queued.
    workers_ready: bool = True


class Policy(Protocol):
    # For metrics.
    name: str

    def choose(self, loads: Sequence[ReplicaLoad]) -> tuple[int, str]:
        """loads: at least one. Returns an index into them and, for metrics, the reason in a word."""
        ...
