"""Long work on the event loop goes in slices."""

import asyncio
from collections.abc import Iterator

from router.replicas.slices import SLICE_S, run_in_slices


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_work_goes_in_slices_and_others_get_their_turn_between_them() -> None:
    clock, log = Clock(), []

    def steps() -> Iterator[None]:
        for number in range(10):
            clock.now += 0.4 * SLICE_S
            log.append(number)
            yield

    run_in_slices(steps(), clock)
    # The first slice runs at once.
    assert log == [0, 1, 2]
    while len(log) < 10 + 3:
        log.append("other")
        await asyncio.sleep(0)
    assert log == [0, 1, 2, "other", 3, 4, 5, "other", 6, 7, 8, "other", 9]


def test_short_work_needs_no_loop() -> None:
    run_in_slices(iter([None] * 1000), Clock())
