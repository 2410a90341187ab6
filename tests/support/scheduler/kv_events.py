"""Schedulers that publish KV events, requests that fill their caches, and what is in these."""

import random
from pathlib import Path

from scheduler.server import SchedulerServer
from scheduler.sessions.kv_events.publisher import outside_hash
from tests.support.scheduler.scheduling import RouterEnd, make_options

TOPIC = "kv-events"


def events_options(directory: Path, **changes: object):
    fields = {
        "kv_events_endpoint": f"ipc://{directory}/kv",
        "kv_events_replay_endpoint": f"ipc://{directory}/kv-replay",
        "kv_events_topic": TOPIC,
        "num_blocks_override": 24,
    }
    return make_options(directory, **(fields | changes))


async def serve_prompts(options, count: int, *, replica: int = 0, seed: int = 0) -> None:
    """Requests with common prefixes, of more blocks than there are: they evict each other's."""
    choose = random.Random(seed)
    async with RouterEnd(options.scheduler_address(replica)) as router:
        for _ in range(count):
            prompt = [20 + choose.randrange(3)] * 24 + [choose.randrange(9)] * choose.randrange(1, 40)
            await router.finish(await router.submit(prompt, max_tokens=choose.randrange(1, 20)))


def cached(server: SchedulerServer) -> set[int]:
    assert server.step_loop.core is not None
    return {outside_hash(each) for each in server.step_loop.core.cached_hashes()}
