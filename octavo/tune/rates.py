"""The search for the highest request rate that keeps the bounds: from infinity downwards."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.lab.bounds import Bounds

# Two rates closer than this are one: a machine's noise is as large.
CLOSE = 1.1
# The next rate, where no lower one is known to be good: after a bound that was missed by little, at first, and after
# that.
_STEP_DOWN_LITTLE, _STEPS_DOWN = 0.9, (0.75, 0.5)
_LITTLE = 1.15
# The next rate at most, where the last one was good: a hint is often near.
_STEP_UP = 1.25
# The first rate below infinity, as a share of the requests per second that all at once gave.
_FIRST = 0.9
# Between a good rate and one that is too high, the next one is where a line through both meets the bound, but leaves
# each side this part: latencies rise ever faster, and are noisy.
_LEAST_PART = 0.25

Measure = Callable[[float], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Highest:
    """rate: the highest that kept the bounds; None: none did. at, measured: that rate or else the last one, with its
    measurement. ceiling: the requests per second that all at once gave, above which no rate lasts; inf: not known."""

    rate: float | None
    at: float
    measured: Mapping[str, Any]
    ceiling: float


def highest_rate(
    measure: Measure,
    bounds: Bounds,
    *,
    start: float = math.inf,
    hint: float | None = None,
    ceiling: float = math.inf,
    max_runs: int = 6,
    close: float = CLOSE,
) -> Highest:
    """Searches with at most max_runs measurements, until a good rate and one that is too high are `close`.

    start: the first rate; below infinity where that is known to break the bounds, and `ceiling` then from there.
    hint: a rate that is expected to be about the highest, tried first below infinity.
    """
    best: tuple[float, Mapping[str, Any], float] | None = None
    rate, too_high, excess, num_down = start, ceiling, math.inf, 0
    at, measured = start, {}
    for _ in range(max_runs):
        # As people write numbers.
        at = rate = float(f"{rate:.4g}")
        measured = measure(rate)
        over = bounds.excess(measured)
        if over <= 1.0:
            best = rate, measured, over
        elif math.isinf(rate):
            # Requests cannot end faster than that.
            too_high = ceiling = measured["requests_s"]
        else:
            too_high, excess = rate, over
        if best is not None:
            if too_high / best[0] <= close or math.isinf(best[0]):
                break
            rate = _between(best[0], best[2], too_high, excess)
        elif math.isinf(rate):
            first = _FIRST * too_high
            rate = min(hint, first) if hint and math.isfinite(hint) else first
        elif over < _LITTLE:
            rate = _STEP_DOWN_LITTLE * too_high
        else:
            rate = _STEPS_DOWN[min(num_down, len(_STEPS_DOWN) - 1)] * too_high
            num_down += 1
        if not rate:
            break
    if best is None:
        return Highest(None, at, measured, ceiling)
    return Highest(best[0], best[0], best[1], ceiling)


def _between(good: float, over: float, too_high: float, excess: float) -> float:
    """A rate between a good one, whose worst latency is `over` times its bound, and one with `excess` times it."""
    if math.isinf(too_high):
        return _STEP_UP * good
    part = 0.5 if math.isinf(excess) else (1.0 - over) / (excess - over)
    part = min(max(part, _LEAST_PART), 1.0 - _LEAST_PART)
    return min(good + part * (too_high - good), _STEP_UP * good)
