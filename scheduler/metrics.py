"""A scheduler's Prometheus metrics: counts are read from its status when scraped, only durations are kept here."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.status import SchedulerStatus

_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)
_SCHEDULE_BUCKETS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1)


class SchedulerMetrics:
    """In a registry of its own."""

    def __init__(self, status: Callable[[], SchedulerStatus]) -> None:
        """status: called for each scrape, on the scraping thread."""
        self.registry = CollectorRegistry()
        self.registry.register(_StatusCollector(status))
        self.step_duration = Histogram(
            "octavo_step_duration_seconds",
            "From sending a plan to having its result.",
            buckets=_STEP_BUCKETS,
            registry=self.registry,
        )
        self.schedule_duration = Histogram(
            "octavo_schedule_duration_seconds",
            "Making a plan and sending it.",
            buckets=_SCHEDULE_BUCKETS,
            registry=self.registry,
        )
        self.invalid_messages = Counter(
            "octavo_invalid_messages",
            "ZeroMQ messages ignored: not decodable, or from an unknown peer.",
            registry=self.registry,
        )


class _StatusCollector(Collector):
    def __init__(self, status: Callable[[], SchedulerStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        load, stats = status.load, status.stats
        gauges = {
            "octavo_num_requests_running": ("Sequences that hold a row.", load.num_running),
            "octavo_num_requests_waiting": ("Sequences that wait.", load.num_waiting),
            "octavo_kv_cache_usage_ratio": ("KV blocks in use, 0 to 1.", status.kv_cache_usage),
            "octavo_worker_epoch": ("Grows each time the workers start anew; 0 before the first.", status.epoch),
        }
        counters = {
            "octavo_num_preemptions": ("Preemptions for want of KV blocks.", stats.num_preemptions),
            "octavo_prompt_tokens": ("Prompt tokens of requests that began to run.", stats.num_prompt_tokens),
            "octavo_generation_tokens": ("Output tokens.", stats.num_output_tokens),
            "octavo_prefix_cache_queries": ("Tokens looked up in the prefix cache.", stats.num_prefix_queries),
            "octavo_prefix_cache_hits": ("Tokens found there.", stats.num_prefix_hits),
        }
        for name, (help, value) in gauges.items():
            yield GaugeMetricFamily(name, help, value=value)
        for name, (help, value) in counters.items():
            yield CounterMetricFamily(name, help, value=value)
