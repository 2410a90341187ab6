"""Measurements that are made once: of a setting on its cluster, which starts only if something is not known yet."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

from octavo.tune.bounds import Bounds
from octavo.tune.rates import highest_rate
from octavo.tune.space import Candidate
from octavo.tune.trials.clusters import Cluster, Clusters, TrialFailed
from octavo.tune.trials.journal import Journal
from octavo.tune.workload import TuneWorkload

# Requests that warm a cluster up.
_WARM_UP_SHARE = 0.05


class Trials:
    def __init__(self, clusters: Clusters, journal: Journal, workload: TuneWorkload, bounds: Bounds) -> None:
        self._clusters, self._journal = clusters, journal
        self._workload, self._bounds = workload, bounds
        self.memory: dict[str, float] = {}

    def starts(self, candidate: Candidate, memory: Mapping[str, float]) -> str:
        """Starts a cluster and sends a part of the load at once. Returns why that fails, or nothing."""
        key = f"starts with {dict(memory)} {candidate.key}"

        def attempt() -> dict[str, Any]:
            start = perf_counter()
            try:
                with self._clusters.open(candidate, memory) as cluster:
                    cluster.measure(self._workload.load(math.inf, share=0.25))
            except TrialFailed as error:
                return {"reason": str(error), "seconds": perf_counter() - start}
            return {"reason": "", "seconds": perf_counter() - start}

        return self._kept(key, attempt)["reason"]

    def record(self, candidate: Candidate, trace: Path) -> dict[str, Any]:
        """Measures all requests at once, and records a trace. Raises TrialFailed."""

        def measure() -> dict[str, Any]:
            for path in self._clusters.traces(trace):
                path.unlink()
            with self._on_cluster(candidate, trace) as run:
                return run(math.inf, 1.0)

        key = f"probe {candidate.key}"
        if key in self._journal.results and not self._clusters.traces(trace):
            # Somebody has tidied up.
            del self._journal.results[key]
        return self._kept(key, measure)

    def search(
        self, candidate: Candidate, stage: str, *, share: float, hint: float | None, max_runs: int
    ) -> tuple[float | None, Mapping[str, Any]]:
        """Returns the highest rate that keeps the bounds, with its numbers; None with those of the last rate tried.

        Raises TrialFailed.
        """
        last: Mapping[str, Any] = {}
        with self._on_cluster(candidate) as run:

            def measure(rate: float) -> Mapping[str, Any]:
                nonlocal last
                last = self._kept(f"{stage} at {rate:g} {candidate.key}", lambda: run(rate, share))
                return last

            found = highest_rate(measure, self._bounds, hint=hint, max_runs=max_runs)
        return (None, last) if found is None else found

    def again(self, candidate: Candidate, stage: str, rate: float) -> Mapping[str, Any]:
        """Measures one rate with all requests. Raises TrialFailed."""
        return self.several(candidate, [(stage, rate)])[0]

    def several(self, candidate: Candidate, wanted: Sequence[tuple[str, float]]) -> list[Mapping[str, Any]]:
        """Measures (stage, rate) after (stage, rate) on one cluster, with all requests. Raises TrialFailed."""
        with self._on_cluster(candidate) as run:

            def measure(stage: str, rate: float) -> Mapping[str, Any]:
                return self._kept(f"{stage} at {rate:g} {candidate.key}", lambda: run(rate, 1.0))

            return [measure(stage, rate) for stage, rate in wanted]

    def _kept(self, key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result under this key, of now or of before an interruption. Raises TrialFailed, then as now."""
        if key not in self._journal.results:
            start = perf_counter()
            try:
                result = compute()
                result.setdefault("seconds", perf_counter() - start)
            except TrialFailed as error:
                result = {"failed": str(error), "seconds": perf_counter() - start}
            self._journal.put(key, result)
        result = self._journal.results[key]
        if "failed" in result:
            raise TrialFailed(result["failed"])
        return result

    def _on_cluster(self, candidate: Candidate, trace: Path | None = None) -> "_Runs":
        return _Runs(lambda: self._clusters.open(candidate, self.memory, trace), self._workload)


class _Runs:
    """A cluster that starts with the first measurement, and ends with the context."""

    def __init__(self, open_: Callable[[], Cluster], workload: TuneWorkload) -> None:
        self._open, self._workload = open_, workload
        self._stack, self._cluster = ExitStack(), None

    def __enter__(self) -> Callable[[float, float], dict[str, Any]]:
        return self._run

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _run(self, rate: float, share: float) -> dict[str, Any]:
        if self._cluster is None:
            self._cluster = self._stack.enter_context(self._open())
            self._cluster.measure(self._workload.load(math.inf, share=_WARM_UP_SHARE))
        return dict(self._cluster.measure(self._workload.load(rate, share=share)))
