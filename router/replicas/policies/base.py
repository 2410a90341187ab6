"""The interface of a routing policy: what it sees of replicas, and what it decides."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.accepted import RoutingHints
from router.replicas.policies.prefix_index import PrefixIndex

# Cost of one more sequence, in waiting prompt tokens: it makes each step a little longer.
_TOKENS_A_SEQUENCE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """The latest Load of a replica, with what this router has submitted since added to it."""

    # The replica's number, which never changes.
    replica: int
    # Running or waiting.
    num_sequences: int
    # Prompt tokens not computed yet.
    num_queued_tokens: int
    # False while its workers are away: what it gets is queued.
    workers_ready: bool = True

    @property
    def num_tokens(self) -> int:
        """Its work, in prompt tokens."""
        return self.num_queued_tokens + _TOKENS_A_SEQUENCE * self.num_sequences


class Policy(Protocol):
    # As in the option routing_policy, and in metrics.
    name: str

    @property
    def prefix_index(self) -> PrefixIndex | None:
        """The index that takes in the replicas' cache events; None: the policy does not need them."""
        ...

    def choose(self, loads: Sequence[ReplicaLoad], hints: RoutingHints) -> tuple[int, str]:
        """Returns an index into `loads` (at least one) and, for metrics, the reason in a word."""
        ...


def ready(loads: Sequence[ReplicaLoad]) -> list[int]:
    """Returns the indexes of replicas whose workers are ready, or all indexes if none are."""
    return [i for i, load in enumerate(loads) if load.workers_ready] or list(range(len(loads)))
