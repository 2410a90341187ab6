"""The judgement of one stream that lived while a fault did."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.faults.crowd import Outcome, differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A stream, compared with its undisturbed run. Times are monotonic seconds, which all processes share. arrivals: of
    its tokens. lost: it failed or lacks tokens; duplicated: it has tokens too many. found: all differences, as text."""

    number: int
    is_sampled: bool
    began: float
    ended: float
    arrivals: list[float]
    is_lost: bool
    is_duplicated: bool
    found: list[str]

    def lived_at(self, begin: float, end: float) -> bool:
        """Returns whether the stream lived at any time between the two."""
        return self.began < end and self.ended > begin

    def longest_gap(self, begin: float, end: float) -> float:
        """Returns the longest time without a token that overlaps the given time."""
        times = [self.began, *self.arrivals, self.ended]
        pairs = itertools.pairwise(times)
        return max((later - sooner for sooner, later in pairs if sooner < end and later > begin), default=0.0)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(outcome: Outcome, expected: Outcome, *, crowd_began: float) -> Verdict:
    """Compares an outcome with the undisturbed one. crowd_began: to which the outcome's times are relative."""
    pairs = list(zip(outcome.generation.choices, expected.generation.choices, strict=True))
    found = [str(each) for each in differences(outcome, expected)]
    found += [f"stream {outcome.plan.number}: inexact" for got, _ in pairs if not got.exact]
    return Verdict(
        number=outcome.plan.number,
        is_sampled=outcome.plan.sampling.temperature != 0,
        began=crowd_began + outcome.began,
        ended=crowd_began + outcome.ended,
        arrivals=[crowd_began + at for at, _, _ in outcome.arrivals],
        is_lost=outcome.error is not None or any(len(got.token_ids) < len(want.token_ids) for got, want in pairs),
        is_duplicated=any(len(got.token_ids) > len(want.token_ids) for got, want in pairs),
        found=found,
    )


def gaps(verdicts: Sequence[Verdict], begin: float, end: float) -> list[float]:
    """The longest gaps of the streams that lived between the two times, in ascending order."""
    return sorted(each.longest_gap(begin, end) for each in verdicts if each.lived_at(begin, end))


def now() -> float:
    return time.monotonic()
