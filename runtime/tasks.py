"""How many tasks an event loop has: a count that grows with what runs, and for ever only if something is forgotten."""

import asyncio

from prometheus_client import CollectorRegistry, Gauge


def count_tasks(registry: CollectorRegistry) -> None:
    """Adds octavo_asyncio_tasks, of the loop that runs now; asked for at each scrape, from any thread."""
    loop = asyncio.get_running_loop()
    gauge = Gauge("octavo_asyncio_tasks", "Tasks of the process's event loop.", registry=registry)
    gauge.set_function(lambda: len(asyncio.all_tasks(loop)))
