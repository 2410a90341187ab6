"""The gauge in which the soak looks for leaked asyncio tasks."""

import asyncio

from prometheus_client import CollectorRegistry

from runtime.telemetry.metrics import count_tasks


async def test_it_counts_the_tasks_of_its_loop_from_any_thread() -> None:
    registry = CollectorRegistry()
    count_tasks(registry)

    async def count() -> float | None:
        return await asyncio.to_thread(registry.get_sample_value, "octavo_asyncio_tasks")

    assert await count() == 1
    sleeper = asyncio.create_task(asyncio.sleep(600))
    assert await count() == 2
    sleeper.cancel()
    await asyncio.wait([sleeper])
    assert await count() == 1
