"""Metrics that count without a lock show the same as prometheus_client's own."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.telemetry.metrics import QuickCounter, QuickHistogram


def test_they_are_exposed_as_those_of_the_library() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    buckets = (0.1, 0.5, 1.0)
    histogram, counter = QuickHistogram("h_seconds", "H.", buckets, ours), QuickCounter("c_total", "C.", ours)
    expected = Histogram("h_seconds", "H.", buckets=buckets, registry=theirs)
    expected_counter = Counter("c_total", "C.", registry=theirs)
    for value in (0.05, 0.1, 0.3, 1.0, 7.0):
        histogram.observe(value)
        expected.observe(value)
    counter.inc(3)
    expected_counter.inc(3)
    assert generate_latest(ours).decode() == "".join(
        line for line in generate_latest(theirs).decode().splitlines(keepends=True) if "_created" not in line
    )
