"""A kind of grey failure, and what it may touch."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from benchmarks.faults.grey.ground import Ground
from benchmarks.faults.grey.verdict import Verdict

SUPERVISOR = "octavo up"


@dataclass(slots=True, kw_only=True)
class Blow:
    """One injection. victims: names of the processes or links that it hits. may_restart: names of the processes that
    may be replaced by it. verdicts: of streams that are not the crowd's. note: for people."""

    victims: list[str]
    may_restart: set[str] = field(default_factory=set)
    verdicts: list[Verdict] = field(default_factory=list)
    note: str = ""


# Injects for some seconds, and returns when the fault is over.
Inject = Callable[[Ground, random.Random, float], Awaitable[Blow]]


def _nothing() -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A kind of fault. seconds: bounds of its length, which is drawn evenly on a logarithmic scale. brief: seconds in
    the short form; None: the short form leaves it out. missing: what this machine lacks for it; empty: nothing.
    needs_weights: of the weight cache on the small disk."""

    name: str
    what: str
    inject: Inject
    seconds: tuple[float, float] = (2.0, 15.0)
    brief: float | None = 0.5
    missing: Callable[[], str] = _nothing
    needs_weights: bool = False

    def draw_seconds(self, choose: random.Random, longest: float) -> float:
        shortest, most = self.seconds
        most = max(shortest, min(most, longest))
        return shortest * (most / shortest) ** choose.random()
