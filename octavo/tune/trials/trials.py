"""Measurements that are made once: of a setting on its cluster, which starts only if something is not known yet, and
serves until another setting's cluster is needed."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

from octavo.lab.journal import Journal
from octavo.lab.settings import Setting
from octavo.tune.trials.clusters import Cluster, Clusters, TrialFailed
from octavo.tune.workload import TuneWorkload

# Requests that warm a cluster up.
_WARM_UP_SHARE = 0.05


class Trials:
    def __init__(self, clusters: Clusters, journal: Journal, workload: TuneWorkload) -> None:
        self._clusters, self._journal, self._workload = clusters, journal, workload
        self.memory: dict[str, float] = {}
        # The cluster that runs, of this setting.
        self._stack, self._cluster, self._of = ExitStack(), None, None

    def close(self) -> None:
        """Ends the cluster that runs, if one does."""
        self._cluster = self._of = None
        self._stack.close()

    def starts(self, setting: Setting, memory: Mapping[str, float]) -> str:
        """Starts a cluster and sends a part of the load at once. Returns why that fails, or nothing."""

        def attempt() -> dict[str, Any]:
            self.close()
            with self._clusters.open(setting, memory) as cluster:
                return cluster.measure(self._workload.load(math.inf, share=0.25))

        try:
            self._kept(f"starts with {dict(memory)} {setting.key}", attempt)
        except TrialFailed as error:
            return str(error)
        return ""

    def record(self, setting: Setting, trace: Path) -> dict[str, Any]:
        """Measures all requests at once, and records a trace. Raises TrialFailed."""

        def measure() -> dict[str, Any]:
            for path in self._clusters.traces(trace):
                path.unlink()
            self.close()
            with self._clusters.open(setting, self.memory, trace) as cluster:
                return self._warmed(cluster).measure(self._workload.load(math.inf))

        key = f"probe {setting.key}"
        if key in self._journal.results and not self._clusters.traces(trace):
            # Somebody has tidied up.
            del self._journal.results[key]
        return self._kept(key, measure)

    def measure(self, setting: Setting, stage: str, rate: float, *, share: float = 1.0) -> Mapping[str, Any]:
        """Measures one rate. share: the part of the load that is sent. Raises TrialFailed."""
        return self._kept(f"{stage} at {rate:g} {setting.key}", lambda: self._measure(setting, rate, share))

    def _measure(self, setting: Setting, rate: float, share: float) -> dict[str, Any]:
        try:
            if self._cluster is None or self._of != setting:
                self.close()
                cluster = self._stack.enter_context(self._clusters.open(setting, self.memory))
                self._cluster, self._of = self._warmed(cluster), setting
            return dict(self._cluster.measure(self._workload.load(rate, share=share)))
        except BaseException:
            self.close()
            raise

    def _warmed(self, cluster: Cluster) -> Cluster:
        cluster.measure(self._workload.load(math.inf, share=_WARM_UP_SHARE))
        return cluster

    def _kept(self, key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result under this key, of now or of before an interruption. Raises TrialFailed, then as now."""
        if key not in self._journal.results:
            start = perf_counter()
            try:
                result = compute()
            except TrialFailed as error:
                result = {"failed": str(error)}
            self._journal.put(key, result | {"seconds": perf_counter() - start})
        result = self._journal.results[key]
        if "failed" in result:
            raise TrialFailed(result["failed"])
        return result
