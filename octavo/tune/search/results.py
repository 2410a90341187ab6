"""The findings of a tuning run: a row for each setting, and the winner."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations
from statistics import median
from typing import Any

from octavo.lab.bounds import lasting
from octavo.lab.settings import Setting
from octavo.tune.search.predictions import Prediction

# Pairs closer than this have no order worth predicting.
_DIFFERS = 1.1


class Status(StrEnum):
    SKIPPED = "skipped"
    MEASURED = "measured"
    FINALIST = "finalist"
    BEST = "best"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class Row:
    """A setting. rate: the highest that kept the bounds; None: none did. at: the rate of `measured`. ceiling: requests
    per second that it answered when all came at once; inf: not known."""

    setting: Setting
    status: Status = Status.SKIPPED
    # Why it was skipped, failed, or lost.
    reason: str = ""
    prediction: Prediction | None = None
    rate: float | None = None
    at: float = math.inf
    ceiling: float = math.inf
    # The numbers of the latest search at `at`, and of a finalist's repeated measurements.
    measured: Mapping[str, Any] = field(default_factory=dict)
    # The part of the load of that search, and its numbers as they are predicted at that rate; empty: they can't be.
    share: float = 0.0
    expected: Mapping[str, Any] = field(default_factory=dict)
    repeats: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def value(self) -> float:
        """Output tokens per second within the bounds: the median of all measurements of one that has several."""
        return median(self.values)

    @property
    def values(self) -> list[float]:
        """Output tokens per second within the bounds, of each measurement."""
        if self.rate is None:
            return [0.0]
        return [lasting(self.rate, each) for each in self.repeats or (self.measured,)]

    def as_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {**dict(self.setting.values), "status": str(self.status), "reason": self.reason}
        if self.prediction is not None:
            found = {"request_rate": _shown(self.prediction.rate), "tok_s_within_bounds": self.prediction.value}
            values["predicted"] = found | dict(self.prediction.numbers)
        if self.measured:
            at = {"request_rate": _shown(self.rate), "share": self.share, "at": _shown(self.at)}
            values["measured"] = at | dict(self.measured)
            values["tok_s_within_bounds"] = self.value
        if self.expected:
            values["expected"] = {**self.expected}
        if self.repeats:
            values["repeats"] = [*self.repeats]
        return values


def _shown(rate: float | None) -> float | str | None:
    return "inf" if rate == math.inf else rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """memory: the option and its value. notes: what was skipped besides settings, and why."""

    rows: list[Row]
    best: Row | None
    memory: Mapping[str, float]
    notes: list[str]

    def accuracy(self) -> dict[str, Any]:
        """Predictions beside measurements of the same rate and load: the median errors of throughput and of the 99th
        percentiles; and the order of pairs of settings that had the same part of the load, by their throughput within
        the bounds as it was predicted before and as it was measured."""
        both = [row for row in self.rows if row.expected and row.measured and row.status is not Status.FAILED]
        apart = [
            (first, second)
            for first, second in combinations([row for row in both if row.prediction is not None], 2)
            if first.share == second.share and _differ(first.value, second.value)
        ]
        right = sum((_predicted(first) > _predicted(second)) == (first.value > second.value) for first, second in apart)
        return {
            "num_settings": len(both),
            "median_error": {key: _median_error(both, key) for key in _COMPARED},
            "pairs_that_differ": len(apart),
            "pairs_in_order": right,
        }


_COMPARED = ("output_tok_s", "ttft_ms_p99", "itl_ms_p99", "e2e_ms_p99")


def _predicted(row: Row) -> float:
    return row.prediction.value if row.prediction is not None else 0.0


def _differ(first: float, second: float) -> bool:
    return max(first, second) > _DIFFERS * min(first, second)


def _median_error(rows: Sequence[Row], key: str) -> float | None:
    errors = sorted(abs(row.expected[key] / row.measured[key] - 1) for row in rows if row.measured[key])
    return round(errors[len(errors) // 2], 4) if errors else None
