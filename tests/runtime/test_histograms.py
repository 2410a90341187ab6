"""Buckets of histograms: what is read, what is new, and quantiles as Prometheus estimates them."""

import pytest
from prometheus_client import CollectorRegistry, Histogram

from runtime.telemetry.histograms import Buckets, read


def test_a_histogram_is_read_by_its_labels() -> None:
    histogram = Histogram("a", "A.", ["thread"], buckets=(1, 2), registry=CollectorRegistry())
    for thread, value in (("x", 0.5), ("x", 1.5), ("y", 9.0)):
        histogram.labels(thread).observe(value)
    assert read(histogram, thread="x") == Buckets((1.0, 2.0), (1, 1, 0))
    assert read(histogram) == Buckets((1.0, 2.0), (1, 1, 1))
    assert read(histogram, thread="z").total == 0


def test_quantiles_are_linear_within_a_bucket() -> None:
    buckets = Buckets((1.0, 2.0, 4.0), (0, 10, 10, 0))
    assert buckets.quantile(0.25) == 1.5
    assert buckets.quantile(0.75) == 3.0
    assert buckets.quantile(1.0) == 4.0
    assert Buckets((1.0,), (0, 5)).quantile(0.5) == 1.0, "above all bounds: the highest one"
    assert Buckets((1.0,), (0, 0)).quantile(0.5) is None


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (Buckets((1.0,), (5, 2)), Buckets((1.0,), (2, 1))),
        # It has begun anew.
        (Buckets((1.0,), (1, 2)), Buckets((1.0,), (1, 2))),
        (Buckets((2.0,), (9, 9)), Buckets((2.0,), (9, 9))),
    ],
)
def test_what_is_new_since_a_reading(now: Buckets, expected: Buckets) -> None:
    assert now.since(Buckets((1.0,), (3, 1))) == expected


def test_replicas_add_up() -> None:
    assert Buckets((1.0,), (1, 2)).plus(Buckets((1.0,), (3, 4))) == Buckets((1.0,), (4, 6))
    assert Buckets().plus(Buckets((1.0,), (3, 4))) == Buckets((1.0,), (3, 4))
