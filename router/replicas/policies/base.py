"""The interface of a routing policy: what it sees of replicas, and what it decides."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.replicas.policies.prefix_index import PrefixIndex
from router.request import RoutingHints

# What one more sequence costs a replica, in prompt tokens that wait: each of its steps is a little longer.
_TOKENS_A_SEQUENCE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """The latest Load of a replica, with what this router has submitted since added to it."""

    # Its number, which it keeps.
    replica: int
    # Running or waiting.
    num_sequences: int
    # Of prompts, not computed yet.
    num_queued_tokens: int
    # False while its workers are away: what it gets is queued.
    workers_ready: bool = True

    @property
    def num_tokens(self) -> int:
        """The work that it has, in prompt tokens."""
        return self.num_queued_tokens + _TOKENS_A_SEQUENCE * self.num_sequences


class Policy(Protocol):
    # As in the option routing_policy, and in metrics.
    name: str

    @property
    def prefix_index(self) -> PrefixIndex | None:
        """Is told of the replicas' cache events; None: the policy does not need them."""
        ...

    def choose(self, loads: Sequence[ReplicaLoad], hints: RoutingHints) -> tuple[int, str]:
        """loads: at least one. Returns an index into them and, for metrics, the reason in a word."""
        ...


def ready(loads: Sequence[ReplicaLoad]) -> list[int]:
    """Indexes of those whose workers are there; of all, if none are."""
    return [i for i, load in enumerate(loads) if load.workers_ready] or list(range(len(loads)))
