"""The desk waits for nothing in this process."""

import asyncio

import pytest

from octavo.local.desk import run_here


async def _pausing(result: object) -> object:
    await asyncio.sleep(0)
    if isinstance(result, Exception):
        raise result
    return result


async def test_it_runs_beside_an_event_loop_and_in_none() -> None:
    assert run_here(_pausing(5)) == 5
    assert await asyncio.to_thread(run_here, _pausing(6)) == 6
    with pytest.raises(KeyError):
        run_here(_pausing(KeyError()))


async def test_nothing_there_waits_for_others() -> None:
    """It would never end."""

    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(AssertionError, match="it waits for <Future pending"):
        run_here(wait())
