"""Runs long work on the event loop in slices, between which everything else gets its turn."""

import asyncio
import time
from collections.abc import Callable, Iterator

# A step that is longer than a slice holds the loop alone.
SLICE_S = 0.005


async def finish_in_slices(steps: Iterator[None], clock: Callable[[], float] = time.monotonic) -> None:
    """Runs a generator to its end, as `run_in_slices` does; returns when it has ended. Raises what it raises.

    A cancelled call ends the generator where it is.
    """
    end = clock() + SLICE_S
    for _ in steps:
        if clock() >= end:
            await asyncio.sleep(0)
            end = clock() + SLICE_S


def run_in_slices(steps: Iterator[None], clock: Callable[[], float] = time.monotonic) -> None:
    """Runs a generator to its end: a slice at once, and a slice in each later turn of the loop.

    steps: yields where it may be interrupted. clock: seconds, never backwards.
    """
    end = clock() + SLICE_S
    for _ in steps:
        if clock() >= end:
            asyncio.get_running_loop().call_soon(run_in_slices, steps, clock)
            return
