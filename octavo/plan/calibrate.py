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

# What the three numbers cost, so that a few noisy results do not choose them freely: a factor off by 10% as much as a
# result missed by 1%, and 10% of the time on what is added as much as one missed by 7%. So the factor explains what all
# results have in common, and the others what is different between few rows and many.
_FACTOR_PRIOR, _ADDED_PRIOR = 0.1, 0.7
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
        shares = np.array([_shares(result, found, settings, num_replicas) for result in results])
        weight = np.diag((_FACTOR_PRIOR, _ADDED_PRIOR, _ADDED_PRIOR)) * np.sqrt(len(results))
        scale = np.maximum(shares.mean(axis=0), 1e-300)
        targets = np.concatenate((np.ones(len(results)), weight @ (scale[0], 0.0, 0.0)))
        factor, step, token = nnls(np.vstack((shares / scale, weight)), targets)[0] / scale
        found = Calibrated(
            engine=engine, factor=max(float(factor), 1e-3), step_seconds=float(step), token_seconds=float(token)
        )
    return found


def _shares(result: ServeResult, found: Calibrated, settings: CoreSettings, num_replicas: int) -> tuple[float, ...]:
    """What a factor of 1, and a second more each step and each token, take of the time measured."""
    run = simulate(settings, found, _workload(result, settings.max_model_len), num_replicas=num_replicas)
    steps, tokens = run.num_steps / num_replicas, run.num_output_tokens / num_replicas
    engine = (run.duration - found.step_seconds * steps - found.token_seconds * tokens) / found.factor
    return engine / result.duration, steps / result.duration, tokens / result.duration


def _workload(result: ServeResult, max_model_len: int) -> Workload:
    return synthesize(
        num_requests=result.num_requests,
        rate=result.request_rate,
        concurrency=result.concurrency,
        prompt_len=parse_lengths(str(result.prompt_len), "prompt_len"),
        output_len=parse_lengths(str(result.output_len), "output_len"),
        max_model_len=max_model_len,
    )
