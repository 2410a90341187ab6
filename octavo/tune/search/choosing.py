"""The settings that are worth a probe, and those that are worth a measurement by what is predicted of them."""

import math
from collections.abc import Sequence
from typing import Any

from octavo.lab.settings import OFF, Setting
from octavo.tune.search.results import Row, Status

# Predictions that differ by less than this share of the best are alike: noise is more.
_ALIKE = 0.03
# By these numbers settings behave differently, though their throughput is predicted to be the same.
_BEHAVIOUR = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "e2e_ms_p50")


def choose(rows: Sequence[Row], *, margin: float, most: int) -> list[Row]:
    """The rows that can still win, `most` of them: those predicted near the best, and those that can't be predicted.
    Tells the others why they are skipped.

    margin: rows predicted to be worse than the best by more than this share are not near. Of those predicted alike, the
    first is the one whose requests take the least time, and the next ones are those that behave most differently: where
    predictions err, they err alike for settings that behave alike.
    """
    rows = [row for row in rows if row.status is not Status.FAILED]
    best = max((row.prediction.value for row in rows if row.prediction), default=0.0)
    near = []
    for row in rows:
        if row.prediction is None:
            near.append(row)
        elif row.prediction.rate is None and best:
            row.reason = f"predicted to break the bounds at every rate: {row.prediction.reason}"
        elif row.prediction.value < (1 - margin) * best:
            behind = 1 - row.prediction.value / best
            row.reason = f"predicted {row.prediction.value:,.4g} output tokens/s, {behind:.0%} below the best"
        else:
            near.append(row)
    chosen: list[Row] = []
    while near and len(chosen) < most:
        row = min(near, key=lambda each: (_tier(each, best), -_difference(each, chosen), _seconds(each)))
        near.remove(row)
        chosen.append(row)
    for row in near:
        row.reason = f"predicted within {margin:.0%} of the best, as {most} others that are faster, or differ more"
    return chosen


def _tier(row: Row, best: float) -> float:
    """The lower the better; what can't be predicted comes first."""
    if row.prediction is None or not best:
        return -math.inf
    return -round(row.prediction.value / best / _ALIKE)


def _seconds(row: Row) -> float:
    return row.prediction.numbers.get("e2e_ms_p50", 0.0) if row.prediction is not None else 0.0


def _difference(row: Row, chosen: Sequence[Row]) -> float:
    """How far the latencies of a row are from those of the chosen row that is most like it, as a sum of logarithms."""
    return min((_distance(row, each) for each in chosen), default=0.0)


def _distance(first: Row, second: Row) -> float:
    if first.prediction is None or second.prediction is None:
        return 0.0
    pairs = [(first.prediction.numbers.get(key), second.prediction.numbers.get(key)) for key in _BEHAVIOUR]
    return round(sum(abs(math.log(a / b)) for a, b in pairs if a and b), 6)


def to_probe(settings: Sequence[Setting]) -> list[Setting]:
    """Settings to probe, the largest first. The steps of one with drafts tell little: it is probed without."""
    plain = [
        each if dict(each.values).get("speculative_config", OFF) == OFF else _without_drafts(each) for each in settings
    ]
    return sorted(dict.fromkeys(plain), key=size_of, reverse=True)


def _without_drafts(setting: Setting) -> Setting:
    return Setting(tuple((name, OFF if name == "speculative_config" else value) for name, value in setting.values))


def size_of(setting: Setting) -> tuple[Any, Any]:
    values = dict(setting.values)
    return values.get("max_num_batched_tokens", 0), values.get("max_num_seqs", 0)
