"""Measures for how much of the time each of two pipeline stages computes.

Uses the real step loop of the scheduler, the real wire, real workers, and a model whose steps take 50 ms in each stage
without using a core.
"""

import asyncio
from pathlib import Path
from typing import Any

from tests.fakes.slow_stage import SlowStage, SlowStageWorker
from tests.support.scheduler.scheduling import RouterEnd, make_options, running_scheduler

# A step has a third of the streams, because three steps are in flight.
_NUM_STREAMS = 6
_STEP_SECONDS = 0.05


async def busy_shares(directory: Path, num_tokens: int, **changes: Any) -> list[list[float]]:
    """The share of time that each stage computes, in each third of a steady decode: [stage][third]."""
    options = make_options(directory, pipeline_parallel_size=2, **changes)
    models = [SlowStage(_STEP_SECONDS) for _ in range(2)]
    async with running_scheduler(options):
        workers = [SlowStageWorker(options, rank, model) for rank, model in enumerate(models)]
        for worker in workers:
            worker.start()
        try:
            async with RouterEnd(options.scheduler_address(0)) as router:
                groups = [
                    await router.submit(
                        [20 + number], seed=number, temperature=0.0, max_tokens=num_tokens, ignore_eos=True
                    )
                    for number in range(_NUM_STREAMS)
                ]
                for group in groups:
                    await router.finish(group)
                    assert len(router.tokens[group, 0]) == num_tokens
        finally:
            for worker in workers:
                await asyncio.to_thread(worker.stop)
    return [_shares(model.steps) for model in models]


def _shares(steps: list[tuple[float, float]]) -> list[float]:
    # Streams come in during the first sixth and end during the last.
    steady = steps[len(steps) // 6 : -len(steps) // 6]
    size = (len(steady) - 1) // 3
    # Each part ends when the next one begins, so that waiting in between counts.
    parts = [steady[start : start + size + 1] for start in range(0, 3 * size, size)]
    return [sum(end - began for began, end in part[:-1]) / (part[-1][0] - part[0][0]) for part in parts]
