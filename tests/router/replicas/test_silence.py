"""A peer's silence is the time in which nothing of it waits to be taken in."""

import asyncio

import pytest

from router.replicas.replica import Silence

_LIMIT_S = 0.05


async def test_the_time_that_a_message_takes_is_no_silence() -> None:
    """A large message is taken in while the event loop runs, so this time does not look like a stall of it."""
    async with Silence(_LIMIT_S) as silence:
        silence.suspend()
        await asyncio.sleep(3 * _LIMIT_S)
        silence.begin()
        # The next message gets all of its time.
        await asyncio.sleep(0)


async def test_silence_counts_again_after_a_message() -> None:
    async def read_one() -> None:
        async with Silence(_LIMIT_S) as silence:
            silence.suspend()
            silence.begin()
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await read_one()
