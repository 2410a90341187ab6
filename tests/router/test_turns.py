"""Long work on the event loop goes in slices, and callers pass in turn."""

import asyncio
from collections.abc import Iterator

import pytest

from router.turns import SLICE_S, Turns, finish_in_slices, run_in_slices


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


async def test_a_caller_can_wait_for_the_end_of_the_slices() -> None:
    clock, log = Clock(), []

    def steps() -> Iterator[None]:
        for number in range(5):
            clock.now += 0.4 * SLICE_S
            log.append(number)
            yield
        raise ValueError("at the end")

    async def work() -> None:
        with pytest.raises(ValueError, match="at the end"):
            await finish_in_slices(steps(), clock)
        log.append("ended")

    working = asyncio.ensure_future(work())
    while not working.done():
        log.append("other")
        await asyncio.sleep(0)
    await working
    assert log == ["other", 0, 1, 2, "other", 3, 4, "ended"]


async def test_a_cancelled_caller_ends_the_work() -> None:
    clock, log = Clock(), []

    def steps() -> Iterator[None]:
        for number in range(10):
            clock.now += SLICE_S
            log.append(number)
            yield

    working = asyncio.ensure_future(finish_in_slices(steps(), clock))
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    await asyncio.sleep(0)
    assert log == [0]


async def test_short_work_is_done_in_one_go() -> None:
    """Nothing runs between two parts of a message of usual size."""
    ended = False

    async def work() -> None:
        nonlocal ended
        await finish_in_slices(iter([None] * 1000), Clock())
        ended = True

    working = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    assert ended
    await working


async def test_callers_take_turns():
    turns, order = Turns(1), []
    await turns.take("running")

    async def task(caller: str) -> None:
        await turns.take(caller)
        order.append(caller)
        turns.give_back()

    tasks = [asyncio.create_task(task(caller)) for caller in ("a", "a", "a", "b", "gone", "b", "c")]
    await asyncio.sleep(0)
    tasks[4].cancel()
    await asyncio.sleep(0)
    turns.give_back()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "b", "c", "a", "b", "a"]
    # All are back: the next one passes at once.
    await asyncio.wait_for(turns.take("d"), 10)
