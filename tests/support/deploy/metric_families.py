"""The contents of each process's /metrics, without running the process."""

import re

from prometheus_client import CollectorRegistry

from configs.options import Options
from router.telemetry.metrics import RouterMetrics, vllm_names
from runtime.telemetry.metrics import exposed
from scheduler.core.messages import CoreStats
from scheduler.telemetry.metrics import SchedulerMetrics, SchedulerStatus
from worker.process.status import WorkerMetrics, WorkerStatus

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


def router_registry(*names: str, metrics: RouterMetrics | None = None) -> CollectorRegistry:
    """names: the option metrics_names."""
    own = (metrics or RouterMetrics()).registry
    return exposed(names, own, vllm_names(own, "a-model"))


def scheduler_registry(*names: str, replica: int = 0) -> CollectorRegistry:
    status = SchedulerStatus(stats=CoreStats(num_preemptions=3), model_name="a-model")
    options = Options(metrics_names=names)  # type: ignore[arg-type]
    return SchedulerMetrics(lambda: status, options, replica).shown


def worker_registry() -> CollectorRegistry:
    return WorkerMetrics(WorkerStatus().snapshot).registry


def series(registry: CollectorRegistry) -> set[str]:
    """Names that a query can use, including those of metrics that have no samples yet."""
    return {family.name + suffix for family in registry.collect() for suffix in _SUFFIXES.get(family.type, ("",))}


# Words of PromQL.
KEYWORDS = {"by", "on", "and", "sum"}


def metric_names(expression: str) -> set[str]:
    """The names in a PromQL expression, without functions, keywords, labels, durations and strings."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b(?:by|on) \([^)]*\)", "", expression)
    return set(re.findall(r"\b[a-z_][a-z0-9_:]*\b(?!\s*\()", bare)) - KEYWORDS
