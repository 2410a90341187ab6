"""Concurrent streams from a running cluster."""

import asyncio
from collections.abc import Callable, Sequence

from octavo import AsyncClient, SamplingParams
from octavo.client.results import Delta, Generation


def say(
    port: int, prompts: Sequence[str], sampling: Sequence[SamplingParams], when_begun: Callable[[], object]
) -> list[tuple[int, ...]]:
    """Returns each stream's tokens. `when_begun` is called once, when all streams have begun and none has ended."""

    async def all_streams() -> list[tuple[int, ...]]:
        begun = asyncio.Barrier(len(prompts))

        async def one(client: AsyncClient, prompt: str, params: SamplingParams) -> Generation:
            async with client.stream([{"role": "user", "content": prompt}], params) as stream:
                waited = False
                async for event in stream:
                    if isinstance(event, Delta) and not waited:
                        waited = True
                        if await begun.wait() == 0:
                            when_begun()
                return stream.generation

        async with AsyncClient(f"localhost:{port}", timeout=120) as client, asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(one(client, *each)) for each in zip(prompts, sampling, strict=True)]
        return [stream.result().choices[0].token_ids for stream in streams]

    return asyncio.run(all_streams())
