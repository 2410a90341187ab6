"""Predictions: what-if runs of the scheduler's core, with costs fitted to the traces of a few probes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.options import Options
from octavo.plan.costs.fitted import fit
from octavo.plan.errors import PlanError
from octavo.plan.recorded import Recording
from octavo.plan.simulate import simulate
from octavo.plan.targets import Calibrated, measured_settings
from octavo.plan.workload import Workload
from octavo.tune.bounds import Bounds, as_predicted
from octavo.tune.rates import highest_rate
from octavo.tune.workload import TuneWorkload
from scheduler.settings import CORE_DRAFTERS

# A factor beyond these means that the probe measured something else than steps.
_FACTORS = (0.5, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A cluster's recording, and what clients measured meanwhile. options: those of that cluster."""

    options: Options
    recording: Recording
    measured: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """rate: the highest that keeps the bounds; its numbers as `as_predicted`. None, and why, if no rate keeps them."""

    rate: float | None
    numbers: Mapping[str, Any]
    reason: str = ""

    @property
    def value(self) -> float:
        """Output tokens per second within the bounds."""
        return 0.0 if self.rate is None else self.numbers["output_tok_s"]


class Predictor:
    """Predicts settings of one engine: those that differ in what the scheduler's core depends on, and nothing else."""

    def __init__(self, probes: Sequence[Probe], workload: TuneWorkload, bounds: Bounds) -> None:
        """Raises PlanError if the probes hold no steps."""
        self._workload, self._bounds = workload, bounds
        self._measurements = probes[0].recording.measurements()
        samples = [sample for probe in probes for sample in probe.recording.measurements().samples]
        self.cost = Calibrated(engine=fit(samples))
        self._outputs = {each.prompt: each.output for probe in probes for each in probe.recording.requests}
        self.cost = replace(self.cost, factor=self._factor(probes))

    def _factor(self, probes: Sequence[Probe]) -> float:
        """How much longer clients wait than the steps take: for routers, sockets and shared cores."""
        logs = []
        for probe in probes:
            run = self._run(probe.options, probe.recording.workload())
            logs.append(math.log(probe.measured["duration_s"] / run.duration))
        low, high = _FACTORS
        return min(max(math.exp(sum(logs) / len(logs)), low), high)

    def predict(self, options: Options) -> Prediction | None:
        """None: the drafts of these options can't be predicted."""
        if options.speculative_config is not None and (
            options.speculative_config.method not in CORE_DRAFTERS or self._known_outputs() is None
        ):
            return None
        last: dict[str, Any] = {}

        def measure(rate: float) -> Mapping[str, Any]:
            workload = self._workload.paper(rate)
            if options.speculative_config is not None:
                workload = replace(workload, outputs=self._known_outputs())
            last.clear()
            last.update(as_predicted(self._run(options, workload)))
            return dict(last)

        try:
            found = highest_rate(measure, self._bounds, max_runs=7)
        except PlanError as error:
            return Prediction(rate=None, numbers={}, reason=str(error))
        if found is None:
            return Prediction(rate=None, numbers=last, reason="; ".join(self._bounds.broken_by(last)))
        return Prediction(rate=found[0], numbers=found[1])

    def at(self, options: Options, rate: float, share: float) -> Mapping[str, Any]:
        """The numbers of one rate and a part of the load, as `as_predicted`, to be compared with what was measured.
        Raises PlanError."""
        workload = self._workload.paper(rate, share=share)
        outputs = self._known_outputs() if options.speculative_config is not None else None
        if outputs is not None:
            workload = replace(workload, outputs=outputs[: len(workload)])
        return as_predicted(self._run(options, workload))

    def _run(self, options: Options, workload: Workload) -> Any:
        settings = measured_settings(self._measurements, options)
        if workload.outputs is None:
            settings = replace(settings, speculation=None)
        return simulate(settings, self.cost, workload, num_replicas=options.data_parallel_size)

    def _known_outputs(self) -> list[Sequence[int]] | None:
        """What the probes answered to the workload's prompts; None if not all of them were asked."""
        outputs = []
        for each in self._workload.requests(math.inf):
            output = None if isinstance(each.prompt, str) else self._outputs.get(tuple(each.prompt))
            if output is None or len(output) != each.output_len:
                return None
            outputs.append(output)
        return outputs
