"""Clusters on a virtual clock, for tests of `octavo tune`: a real scheduling core, and steps of a known cost."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from configs.load import load_options
from configs.options import Options
from octavo.bench.datasets.chosen import choose
from octavo.bench.serve import Load
from octavo.lab.flags import LoadFlags
from octavo.lab.settings import Setting
from octavo.plan import simulate as simulating
from octavo.plan.simulate import simulate
from octavo.tune.trials.clusters import TrialFailed
from octavo.tune.workload import TuneWorkload, paper_workload
from protos import inference_pb2
from scheduler.recording.file import RecordingWriter, recording_path
from scheduler.settings import core_settings
from tests.support.scheduler.plan import LinearCost
from tests.support.scheduler.recordings import recorded

_MODEL = inference_pb2.ModelInfo(block_size=16, num_blocks=600, max_model_len=512)


class SimulatedClusters:
    """refuse: says why a setting does not start, or nothing. noise: standard deviation of measured times."""

    def __init__(
        self,
        cost: Callable[[Options], LinearCost],
        *,
        refuse: Callable[[Setting, Mapping[str, float]], str] = lambda setting, memory: "",
        noise: float = 0.01,
        seed: int = 0,
    ) -> None:
        self.cost, self.refuse, self.noise = cost, refuse, noise
        self.random = np.random.default_rng(seed)
        self.num_starts = self.num_measurements = self.num_running = 0
        # Seconds of the virtual clock in which something was measured.
        self.seconds = 0.0
        # Raises KeyboardInterrupt at this measurement.
        self.interrupt_at: int | None = None

    @staticmethod
    def options(setting: Setting, memory: Mapping[str, float]) -> Options:
        return load_options(None, {**setting.options, **memory}, {})

    def open(self, setting: Setting, memory: Mapping[str, float], trace: Path | None = None) -> "SimulatedCluster":
        return SimulatedCluster(self, setting, memory, trace)

    def traces(self, trace: Path) -> list[Path]:
        path = recording_path(str(trace), 0)
        return [path] if path.exists() else []


class SimulatedCluster:
    def __init__(
        self, clusters: SimulatedClusters, setting: Setting, memory: Mapping[str, float], trace: Path | None
    ) -> None:
        self._clusters, self._setting, self._memory, self._trace = clusters, setting, memory, trace

    def __enter__(self) -> Self:
        self._clusters.num_starts += 1
        if reason := self._clusters.refuse(self._setting, self._memory):
            raise TrialFailed(reason)
        # The machine is for one at a time.
        assert not self._clusters.num_running
        self._clusters.num_running = 1
        return self

    def __exit__(self, *error: object) -> None:
        self._clusters.num_running = 0

    def measure(self, load: Load) -> dict[str, Any]:
        clusters = self._clusters
        clusters.num_measurements += 1
        if clusters.num_measurements == clusters.interrupt_at:
            raise KeyboardInterrupt
        options = clusters.options(self._setting, self._memory)
        assert load.dataset is not None
        workload = paper_workload(load.dataset.requests(load.num_requests, 0, vocab_size=100, as_text=False))
        cost, settings = clusters.cost(options), core_settings(options, _MODEL)
        with pytest.MonkeyPatch.context() as patch:
            writer = None
            if self._trace is not None:
                path = recording_path(str(self._trace), 0)
                path.parent.mkdir(parents=True, exist_ok=True)
                writer = RecordingWriter(path, 1 << 24, 0)
                patch.setattr(simulating, "Core", recorded(writer))
            run = simulate(settings, cost, workload)
            if writer is not None:
                writer.close()
        clusters.seconds += run.duration
        factor = float(np.exp(clusters.noise * clusters.random.standard_normal()))
        numbers = run.measured()
        for key, value in numbers.items():
            if key.endswith("_s"):
                numbers[key] = value * factor if key == "duration_s" else value / factor
            elif "_ms_" in key:
                numbers[key] = value * factor
        return numbers | {"client_cpu": 0.1}


def cost_of(options: Options) -> LinearCost:
    return LinearCost(step=0.006, token=0.0003)


def workload_of(num_requests: int = 16, **query: Any) -> TuneWorkload:
    return TuneWorkload(
        dataset=choose(LoadFlags(**query)), num_requests=num_requests, vocab_size=10_000, max_model_len=512
    )
