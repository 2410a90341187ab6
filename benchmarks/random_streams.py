"""Streams of random lengths: a third is left by its client in mid-stream, a third has a deadline it may not meet."""

import asyncio
import random
import time
from collections import Counter

from octavo import AsyncClient, SamplingParams
from octavo.errors import Cancelled, DeadlineExceeded
from octavo.results import Delta, Finished


async def one_stream(client: AsyncClient, choose: random.Random) -> str:
    """How one stream ended."""
    kind = choose.choice(["whole", "cancel", "deadline"])
    prompt = [choose.randrange(100, 40_000) for _ in range(choose.randint(1, 200))]
    sampling = SamplingParams(
        temperature=choose.choice([0.0, 0.9]), n=choose.choice([1, 1, 1, 3]), max_tokens=choose.randint(1, 64)
    )
    cancel_after = choose.randint(0, 20) if kind == "cancel" else None
    timeout = choose.uniform(0.05, 20.0) if kind == "deadline" else None
    num_pieces = 0
    try:
        async with client.stream(prompt, sampling, timeout=timeout) as stream:
            async for event in stream:
                if isinstance(event, Finished):
                    return "finished"
                num_pieces += isinstance(event, Delta)
                if cancel_after is not None and num_pieces >= cancel_after:
                    return "left"
    except DeadlineExceeded:
        return "deadline"
    except Cancelled:
        return "cancelled"
    return "ended without a finish"


async def keep_streams(target: str, concurrency: int, duration: float, seed: int) -> Counter[str]:
    """Keeps `concurrency` streams alive for `duration` seconds, then lets the last ones end."""
    ends: Counter[str] = Counter()
    stop_at = time.monotonic() + duration

    async def keep_streaming(client: AsyncClient, index: int) -> None:
        choose = random.Random(f"{seed}/{index}")
        while time.monotonic() < stop_at:
            ends[await one_stream(client, choose)] += 1

    async with AsyncClient(target, timeout=300) as client, asyncio.TaskGroup() as tasks:
        for index in range(concurrency):
            tasks.create_task(keep_streaming(client, index))
    return ends
