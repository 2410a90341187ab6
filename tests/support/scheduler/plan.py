"""Costs simple enough to add up by hand, and small workloads, for tests of the simulator."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.plan.costs.step_shape import StepShape
from octavo.plan.simulate import Run, simulate
from octavo.plan.workload import NO_PREFIX, Workload
from scheduler.core.messages import CoreSettings


@dataclass(frozen=True, kw_only=True)
class LinearCost:
    """A `CostModel`: seconds per step and per token, on each stage."""

    step: float = 1.0
    token: float = 0.0
    num_stages: int = 1
    host_seconds: float = 0.0

    @property
    def parts(self) -> tuple[str, ...]:
        return ("steps", "tokens")

    def stage_seconds(self, shape: StepShape) -> Sequence[float]:
        return self.step, self.token * shape.num_tokens


def settings(**changes: object) -> CoreSettings:
    """Settings with plenty of everything, except for `changes`."""
    values: dict[str, object] = {
        "block_size": 8, "num_blocks": 1000, "max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 64,
    }  # fmt: skip
    return CoreSettings(**(values | changes))  # type: ignore[arg-type]


def workload(
    *requests: tuple[float, int, int], concurrency: int = 0, prefix_lens: Sequence[int] | None = None
) -> Workload:
    """Requests of (arrival, prompt length, output length); prefix_lens: tokens of one common prefix in each."""
    arrivals, prompts, outputs = (np.array(column) for column in zip(*requests, strict=True))
    shared = np.array(prefix_lens if prefix_lens is not None else [0] * len(requests))
    return Workload(
        arrivals=arrivals.astype(float),
        prompt_lens=prompts,
        output_lens=outputs,
        prefix_ids=np.where(shared > 0, 0, NO_PREFIX),
        prefix_lens=shared,
        concurrency=concurrency,
    )


def run(requests: Workload, cost: LinearCost | None = None, *, num_replicas: int = 1, **changes: object) -> Run:
    return simulate(settings(**changes), cost or LinearCost(), requests, num_replicas=num_replicas)
