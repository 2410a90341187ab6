"""Metrics of the load of experts."""

from collections.abc import Iterator

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker.layers.forward_context import ExpertLoad

# One series per expert per layer. DeepSeek-V3 would have 14,848.
_MOST_SERIES = 4096


class ExpertMetrics(Collector):
    def __init__(self, load: ExpertLoad) -> None:
        self._load = load

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics; called at each scrape, on any thread."""
        load = self._load
        tokens = {str(layer): tokens_N for layer, tokens_N in load.tokens_N.items()}
        if len(tokens) * load.num_experts > _MOST_SERIES:
            tokens = {"all": np.sum([*tokens.values()], axis=0)}
        counter = CounterMetricFamily(
            "octavo_expert_tokens",
            "Tokens that chose an expert, at all ranks that share experts with this one. Summed over all layers if the "
            f"model has more than {_MOST_SERIES} experts in all.",
            labels=["layer", "expert"],
        )
        for layer, tokens_N in tokens.items():
            for expert, count in enumerate(tokens_N.tolist()):
                counter.add_metric([layer, str(expert)], count)
        imbalance = GaugeMetricFamily(
            "octavo_expert_imbalance",
            "Tokens of a layer's busiest expert over the mean, since the start.",
            labels=["layer"],
        )
        for layer in load.tokens_N:
            imbalance.add_metric([str(layer)], load.imbalance(layer))
        yield counter
        yield imbalance
