"""Reads the buckets of a histogram, takes differences between two readings, and estimates quantiles."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.metrics_core import Metric


class Collects(Protocol):
    """A histogram, Prometheus's own or another."""

    def collect(self) -> Iterable[Metric]: ...


@dataclass(frozen=True, slots=True)
class Buckets:
    """bounds: upper ones, ascending. counts: values in each bucket; one more than bounds, for those above them."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)

    @property
    def total(self) -> int:
        return sum(self.counts)

    def since(self, before: "Buckets") -> "Buckets":
        """Returns what came after `before`; all of it if the histogram has begun anew, or has other bounds."""
        if self.bounds != before.bounds or any(new < old for new, old in zip(self.counts, before.counts, strict=True)):
            return self
        return Buckets(self.bounds, tuple(new - old for new, old in zip(self.counts, before.counts, strict=True)))

    def plus(self, other: "Buckets") -> "Buckets":
        """Adds another one; one with other bounds is left out unless this one is empty."""
        if self.bounds != other.bounds:
            return self if self.total else other
        return Buckets(self.bounds, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    def quantile(self, q: float) -> float | None:
        """Estimates a quantile as Prometheus does: linear within a bucket, and the highest bound for values above it.

        q: 0 to 1. None if there are no values.
        """
        rank, below = q * self.total, 0
        if not self.total:
            return None
        for i, count in enumerate(self.counts):
            if count and below + count >= rank:
                if i == len(self.bounds):
                    return self.bounds[-1] if self.bounds else None
                low = self.bounds[i - 1] if i else 0.0
                return low + (self.bounds[i] - low) * max(rank - below, 0.0) / count
            below += count
        return self.bounds[-1]


def read(histogram: Collects, **labels: str) -> Buckets:
    """Reads the buckets of the series with these labels, all together if there are several."""
    cumulative: dict[float, float] = {}
    for family in histogram.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket") and labels.items() <= sample.labels.items():
                bound = float(sample.labels["le"])
                cumulative[bound] = cumulative.get(bound, 0.0) + sample.value
    bounds = sorted(cumulative)
    values = [cumulative[bound] for bound in bounds]
    counts = tuple(int(value - below) for value, below in zip(values, [0.0, *values], strict=False))
    return Buckets(tuple(bound for bound in bounds if not math.isinf(bound)), counts or (0,))
