"""The search for the highest request rate that keeps the bounds: from infinity downwards."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from octavo.tune.bounds import Bounds

# Two rates closer than this are one: a machine's noise is as large.
_CLOSE = 1.1
# The next rate, where no lower one is known to be good: at first, and after that.
_STEPS_DOWN = (0.75, 0.5)
# The next rate at most, where the last one was good: a hint is often near.
_STEP_UP = 1.25
# The first rate below infinity, as a share of the requests per second that all at once gave.
_FIRST = 0.9

Measure = Callable[[float], Mapping[str, Any]]


def highest_rate(
    measure: Measure, bounds: Bounds, *, hint: float | None = None, max_runs: int = 6
) -> tuple[float, Mapping[str, Any]] | None:
    """Returns the highest rate found that keeps the bounds, with its measurement; None if none was found.

    hint: a rate that is expected to be about the highest, tried first below infinity.
    """
    measured = measure(math.inf)
    if not bounds.broken_by(measured):
        return math.inf, measured
    # Requests cannot end faster than that.
    too_high = measured["requests_s"]
    if not too_high:
        return None
    best: tuple[float, Mapping[str, Any]] | None = None
    rate = min(hint, _FIRST * too_high) if hint and math.isfinite(hint) else _FIRST * too_high
    num_down = 0
    for _ in range(max_runs - 1):
        # As people write numbers.
        rate = float(f"{rate:.4g}")
        measured = measure(rate)
        if bounds.broken_by(measured):
            too_high = rate
        else:
            best = rate, measured
        if best is None:
            rate = _STEPS_DOWN[min(num_down, len(_STEPS_DOWN) - 1)] * too_high
            num_down += 1
        elif too_high / best[0] <= _CLOSE:
            break
        else:
            rate = min((best[0] + too_high) / 2, _STEP_UP * best[0])
    return best
