"""What a worker counts, for /metrics."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from protos import step_pb2
from worker.heartbeat import StatusSnapshot

# Of the columns of step.proto.
_DECODE_ROW_BYTES, _TOKEN_ID_BYTES = 2, 4
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class WorkerMetrics:
    """Metrics of one rank, in a registry of their own."""

    def __init__(self, status: Callable[[], StatusSnapshot]) -> None:
        """status: called at each scrape, on any thread."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._step_seconds = Histogram(
            "octavo_worker_step_seconds",
            "From a plan's arrival to its result's dispatch.",
            registry=self.registry,
            buckets=_STEP_BUCKETS,
        )
        self._part_seconds = Counter(
            "octavo_worker_step_part_seconds", "Time within steps, by part.", ["part"], registry=self.registry
        )
        self._tokens = Counter("octavo_worker_tokens", "Tokens computed.", registry=self.registry)
        self._sampled = Counter("octavo_worker_sampled_tokens", "Tokens sampled.", registry=self.registry)
        self._swapped = Counter(
            "octavo_worker_swapped_blocks",
            "KV blocks copied out to host memory, or in from there.",
            ["direction"],
            registry=self.registry,
        )
        self._failed = Counter(
            "octavo_worker_failed_sequences", "Sequences whose logits were not finite.", registry=self.registry
        )
        self._failures = Counter(
            "octavo_worker_epoch_failures",
            "Epochs ended by a message that could not be followed.",
            registry=self.registry,
        )
        self._rows = Gauge("octavo_worker_rows", "Rows that hold a sequence.", registry=self.registry)
        for name, help in (
            ("state", "1 loading, 2 compiling, 3 idle, 4 stepping."),
            ("epoch", "The epoch in force."),
            ("progress", "Of loading, 0 to 1."),
        ):
            gauge = Gauge(f"octavo_worker_{name}", help, registry=self.registry)
            gauge.set_function(lambda name=name: float(getattr(status(), name)))

    def count_step(self, plan: step_pb2.StepPlan, result: step_pb2.StepResult, num_rows: int) -> None:
        """num_rows: rows that hold a sequence after the step."""
        timing = result.timing
        self._step_seconds.observe(timing.total)
        self._part_seconds.labels("forward").inc(timing.forward)
        self._part_seconds.labels("sample").inc(timing.sample)
        self._part_seconds.labels("other").inc(max(0.0, timing.total - timing.forward - timing.sample))
        self._tokens.inc(len(plan.decode_rows) // _DECODE_ROW_BYTES + sum(plan.num_tokens))
        self._sampled.inc(len(result.token_ids) // _TOKEN_ID_BYTES)
        if plan.swap_out_blocks or plan.swap_in_blocks:
            self._swapped.labels("out").inc(len(plan.swap_out_blocks))
            self._swapped.labels("in").inc(len(plan.swap_in_blocks))
        self._failed.inc(len(result.failed_sequences))
        self._rows.set(num_rows)

    def count_epoch_failure(self) -> None:
        self._failures.inc()
