"""Costs simple enough to add up by hand, and small workloads, for tests of the simulator."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from octavo.plan import simulate as simulating
from octavo.plan.costs.step_shape import StepShape
from octavo.plan.simulate import Run, simulate
from octavo.plan.workload import NO_PREFIX, Workload, parse_lengths, synthesize
from scheduler.core.messages import CoreSettings
from scheduler.recording.file import RecordingWriter
from tests.support.scheduler.recordings import recorded


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
        "block_size": 8,
        "num_blocks": 1000,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
    }
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


COST = LinearCost(step=0.004, token=0.0005)


def load(num_requests: int = 40, rate: float = 8.0) -> Workload:
    return synthesize(
        num_requests=num_requests,
        rate=rate,
        concurrency=0,
        prompt_len=parse_lengths("uniform:4:60", "prompt_len"),
        output_len=parse_lengths("uniform:2:30", "output_len"),
        max_model_len=512,
        shared_prefix=0.5,
        num_prefixes=3,
    )


def record(path: Path, monkeypatch: pytest.MonkeyPatch, workload: Workload, core: CoreSettings) -> Run:
    """Simulates a workload with a core that is recorded, as a scheduler's."""
    writer = RecordingWriter(path, 1 << 24, 0)
    with monkeypatch.context() as patch:
        patch.setattr(simulating, "Core", recorded(writer))
        run = simulate(core, COST, workload)
    writer.close()
    return run
