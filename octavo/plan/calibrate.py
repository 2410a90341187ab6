"""From an engine alone to a cluster: what router, sockets and shared cores add to its steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from octavo.plan.fitted import Fitted
from octavo.plan.samples import ServeResult
from octavo.plan.simulate import simulate
from octavo.plan.step_shape import StepShape
from octavo.plan.workload import Workload, parse_lengths, synthesize
from scheduler.messages import CoreSettings

# A factor away from 1 counts as an error this many times smaller. Few results must not fit three numbers freely.
_PRIOR = 0.2
# The number of steps hardly depends on how long they take: it settles at once.
_NUM_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A `CostModel`: the engine's seconds times `factor`, and seconds that each step and each output token add."""

    engine: Fitted
    factor: float = 1.0
    step_seconds: float = 0.0
    token_seconds: float = 0.0

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.engine.parts, "around the engine")

    @property
    def num_stages(self) -> int:
        return self.engine.num_stages

    @property
    def host_seconds(self) -> float:
        return self.engine.host_seconds

    def stage_seconds(self, shape: StepShape) -> Sequence[float]:
        around = self.step_seconds + self.token_seconds * shape.num_sampled
        return [*(seconds * self.factor for seconds in self.engine.stage_seconds(shape)), around]


def calibrate(
    engine: Fitted, results: Sequence[ServeResult], settings: CoreSettings, *, num_replicas: int
) -> Calibrated:
    """Chooses the three numbers so that simulations of these runs take as long as they took.

    results: of a cluster with these settings and replicas. All three are 0 or more, with the factor near 1.
    """
    found = Calibrated(engine=engine)
    for _ in range(_NUM_ROUNDS):
        rows, targets = [], []
        for result in results:
            run = simulate(settings, found, _workload(result, settings.max_model_len), num_replicas=num_replicas)
            steps, tokens = run.num_steps / num_replicas, run.num_output_tokens / num_replicas
            added = found.step_seconds * steps + found.token_seconds * tokens
            engine_seconds = (run.duration - added) / found.factor
            rows.append(np.array((engine_seconds, steps, tokens)) / result.duration)
            targets.append(1.0)
        rows.append(np.array((_PRIOR, 0.0, 0.0)))
        targets.append(_PRIOR)
        scale = np.maximum(np.max(rows, axis=0), 1e-300)
        factor, step, token = nnls(np.array(rows) / scale, np.array(targets))[0] / scale
        found = Calibrated(
            engine=engine, factor=max(float(factor), 1e-3), step_seconds=float(step), token_seconds=float(token)
        )
    return found


def _workload(result: ServeResult, max_model_len: int) -> Workload:
    return synthesize(
        num_requests=result.num_requests,
        rate=result.request_rate,
        concurrency=result.concurrency,
        prompt_len=parse_lengths(str(result.prompt_len), "prompt_len"),
        output_len=parse_lengths(str(result.output_len), "output_len"),
        max_model_len=max_model_len,
    )
