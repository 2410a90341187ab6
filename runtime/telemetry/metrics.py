"""Exposes metrics under the names of option metrics_names (our own, vLLM's, or both), and counts asyncio tasks."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.telemetry.logs import num_dropped_records


def count_tasks(registry: CollectorRegistry) -> None:
    """Adds octavo_asyncio_tasks, which counts the running loop's tasks at each scrape, from any thread."""
    loop = asyncio.get_running_loop()
    gauge = Gauge("octavo_asyncio_tasks", "Tasks of the process's event loop.", registry=registry)
    gauge.set_function(lambda: len(asyncio.all_tasks(loop)))


class _DroppedRecords(Collector):
    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "octavo_log_records_dropped",
            "Log records that were dropped, because nothing read the log and too many waited.",
            num_dropped_records(),
        )


def count_dropped_records(registry: CollectorRegistry) -> None:
    """Adds octavo_log_records_dropped_total, of this process's log."""
    registry.register(_DroppedRecords())


# Maps our labels to vLLM's; None: the series is not part of vLLM's metric.
Relabel = Callable[[Mapping[str, str]], Mapping[str, str] | None]


class VllmNames(Collector):
    """Shows a registry's metrics under vLLM's names, if vLLM has a counterpart."""

    def __init__(
        self,
        source: CollectorRegistry,
        names: Mapping[str, Sequence[str]],
        labels: Callable[[], Mapping[str, str]],
        relabel: Mapping[str, Relabel] | None = None,
    ) -> None:
        """names: maps our families (counters without _total) to vLLM's; to several if vLLM has had several names.

        labels: called at each scrape; returns the labels that vLLM puts on every metric. relabel: by our name, for
        metrics with other labels at vLLM; series that get equal labels are added up.
        """
        self._source, self._names, self._labels, self._relabel = source, names, labels, relabel or {}

    def collect(self) -> Iterator[Metric]:
        common = self._labels()
        for family in self._source.collect():
            for name in self._names.get(family.name, ()):
                yield self._as_vllm(family, name, common)

    def _as_vllm(self, family: Metric, name: str, common: Mapping[str, str]) -> Metric:
        relabel = self._relabel.get(family.name)
        values: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        for sample in family.samples:
            labels = sample.labels if relabel is None else relabel(sample.labels)
            # The start time of a series makes no sense for a sum of several.
            if labels is not None and not sample.name.endswith("_created"):
                suffix = sample.name.removeprefix(family.name)
                values[suffix, tuple({**common, **labels}.items())] += sample.value
        shown = Metric(name, family.documentation, family.type)
        for (suffix, labels), value in values.items():
            shown.add_sample(name + suffix, dict(labels), value)
        return shown


def exposed(names: Sequence[str], own: CollectorRegistry, vllm: Collector) -> CollectorRegistry:
    """The registry that /metrics serves: process_* (memory, CPU, start) and the metrics of the option `names`."""
    shown = CollectorRegistry()
    ProcessCollector(registry=shown)
    if "octavo" in names:
        shown.register(own)
    if "vllm" in names:
        shown.register(vllm)
    return shown
