"""Predictions: what-if runs of the scheduler's core, with costs fitted to the traces of a few probes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.options import Options
from octavo.lab.bounds import Bounds, lasting
from octavo.lab.errors import PlanError
from octavo.plan.costs.fitted import fit
from octavo.plan.recorded import Recording
from octavo.plan.simulate import Run, simulate
from octavo.plan.targets import measured_settings
from octavo.plan.workload import Workload
from octavo.tune.rates import highest_rate
from octavo.tune.workload import TuneWorkload
from scheduler.settings import CORE_DRAFTERS

# A factor beyond these means that the probe measured something else than steps.
_FACTORS = (0.5, 3.0)
_PERCENTILES = ("ttft_ms_p99", "itl_ms_p99", "e2e_ms_p99")
# Simulated runs cost little: the highest rate may be found finely.
_MAX_RUNS, _CLOSE = 12, 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A cluster's recording, and what clients measured meanwhile. options: those of that cluster."""

    options: Options
    recording: Recording
    measured: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """rate: the highest that keeps the bounds; its numbers as `as_measured`. None, and why, if no rate keeps them."""

    rate: float | None
    numbers: Mapping[str, Any]
    reason: str = ""

    @property
    def value(self) -> float:
        """Output tokens per second within the bounds."""
        return 0.0 if self.rate is None else lasting(self.rate, self.numbers)


class Predictor:
    """Predicts settings of one engine: those that differ in what the scheduler's core depends on, and nothing else.

    What clients measured beside a simulated run of the same load becomes factors: one of all steps' time, for routers,
    sockets and shared cores, and one of each 99th percentile, whose worst steps no median of steps foretells. These are
    the probes' until `learn` is told a measurement, and then those of all measurements, which are of better settings.
    """

    def __init__(self, probes: Sequence[Probe], workload: TuneWorkload, bounds: Bounds) -> None:
        """Raises PlanError if the probes hold no steps."""
        self._workload, self._bounds = workload, bounds
        self._measurements = probes[0].recording.measurements()
        samples = [sample for probe in probes for sample in probe.recording.measurements().samples]
        self.cost = fit(samples)
        self._outputs = {each.prompt: each.output for probe in probes for each in probe.recording.requests}
        loads = [self._load_of(probe) for probe in probes]
        durations = [
            probe.measured["duration_s"] / self._run(probe.options, load).duration
            for probe, load in zip(probes, loads, strict=True)
        ]
        self.cost = replace(self.cost, factor=_middle(durations))
        # By percentile: measured over simulated.
        self._probed, self._learned = ({key: [] for key in _PERCENTILES} for _ in range(2))
        for probe, load in zip(probes, loads, strict=True):
            _compare(self._run(probe.options, load).measured(), probe.measured, self._probed)

    @property
    def factors(self) -> dict[str, float]:
        """How much longer the 99th percentiles of clients are than simulated ones."""
        return {key: _middle(self._learned[key] or self._probed[key]) for key in _PERCENTILES}

    def learn(self, options: Options, rate: float, share: float, measured: Mapping[str, Any]) -> None:
        """Adds a measurement. Raises PlanError."""
        _compare(self._run(options, self._paper(options, rate, share)).measured(), measured, self._learned)

    def predict(self, options: Options) -> Prediction | None:
        """None: the drafts of these options can't be predicted."""
        if options.speculative_config is not None and (
            options.speculative_config.method not in CORE_DRAFTERS or self._known_outputs() is None
        ):
            return None
        try:
            found = highest_rate(
                lambda rate: self.at(options, rate, 1.0), self._bounds, max_runs=_MAX_RUNS, close=_CLOSE
            )
        except PlanError as error:
            return Prediction(rate=None, numbers={}, reason=str(error))
        if found.rate is None:
            reason = "; ".join(self._bounds.broken_by(found.measured))
            return Prediction(rate=None, numbers=found.measured, reason=reason)
        return Prediction(rate=found.rate, numbers=found.measured)

    def at(self, options: Options, rate: float, share: float) -> Mapping[str, Any]:
        """The numbers of one rate and a part of the load, as `as_measured`, to be compared with what was measured.
        Raises PlanError."""
        numbers = self._run(options, self._paper(options, rate, share)).measured()
        return numbers | {key: round(numbers[key] * factor, 3) for key, factor in self.factors.items()}

    def _load_of(self, probe: Probe) -> Workload:
        """The requests that clients measured, without those that warmed the cluster up before."""
        count = len(self._workload.requests(math.inf))
        return replace(probe.recording, requests=probe.recording.requests[-count:]).workload()

    def _paper(self, options: Options, rate: float, share: float) -> Workload:
        workload = self._workload.paper(rate, share=share)
        outputs = self._known_outputs() if options.speculative_config is not None else None
        return workload if outputs is None else replace(workload, outputs=outputs[: len(workload)])

    def _run(self, options: Options, workload: Workload) -> Run:
        settings = measured_settings(self._measurements, options)
        if workload.outputs is None:
            settings = replace(settings, speculation=None)
        return simulate(settings, self.cost, workload, num_replicas=options.data_parallel_size)

    def _known_outputs(self) -> list[Sequence[int]] | None:
        """The probes' answers to the workload's prompts; None if not all of them were asked."""
        outputs = []
        for each in self._workload.requests(math.inf):
            output = None if isinstance(each.prompt, str) else self._outputs.get(tuple(each.prompt))
            if output is None or len(output) != each.output_len:
                return None
            outputs.append(output)
        return outputs


def _compare(simulated: Mapping[str, Any], measured: Mapping[str, Any], ratios: Mapping[str, list[float]]) -> None:
    for key, found in ratios.items():
        if simulated[key] and measured[key]:
            found.append(measured[key] / simulated[key])


def _middle(ratios: Sequence[float]) -> float:
    """The geometric mean, within bounds; 1 of none."""
    low, high = _FACTORS
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0
    return min(max(mean, low), high)
