"""Connections that send a byte now and then occupy a worker's /health, and `octavo up` does not take it for hung."""

import asyncio
import contextlib
from contextlib import AsyncExitStack
from pathlib import Path

from tests.support.supervised import Supervised

NUM_CONNECTIONS = 80


async def dribble(port: int) -> None:
    """Sends a byte each 0.2 s, on one connection after the other."""
    while True:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"G")
                await writer.drain()
                await asyncio.sleep(0.2)


async def test_slow_bytes_get_no_worker_killed(tmp_path: Path) -> None:
    """Before: it was killed after 0.5 s, the supervisor's bound here."""
    async with Supervised(tmp_path) as it, AsyncExitStack() as stack:
        await it.wait_until_served()
        port = it.supervisor.processes[0].spec.health_port
        for _ in range(NUM_CONNECTIONS):
            stack.callback(asyncio.create_task(dribble(port)).cancel)
        await asyncio.sleep(6.0)
        assert not it.events
