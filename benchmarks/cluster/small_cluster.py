"""A SmolLM2 cluster on this machine's CPUs, and its answers to a few concurrent streams."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.cluster.up import serving
from octavo import AsyncClient, SamplingParams

PROMPTS = [
    "What is the capital of France? Answer briefly.",
    "Count from one to ten.",
    "Tell me about rain.",
    "Write a line about the sea.",
]


@contextmanager
def cluster(port: int, *flags: str, metrics_port: int = 0) -> Iterator[None]:
    """Runs `octavo up` with one thread a worker, in float32: another order of summation then changes the chosen token
    only where two logits are equal to 7 digits."""
    with serving(
        *("--dtype=float32", "--kv-cache-memory=0.1", "--worker-threads=1"),
        *(f"--port={port}", f"--metrics-port={metrics_port}", *flags),
    ):
        yield


def say(port: int, num_streams: int, num_tokens: int) -> tuple[list[tuple[int, ...]], float]:
    """Returns the greedy tokens of each stream, and the seconds that all took together."""
    return asyncio.run(_say(port, num_streams, num_tokens))


async def _say(port: int, num_streams: int, num_tokens: int) -> tuple[list[tuple[int, ...]], float]:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    async with AsyncClient(f"localhost:{port}", timeout=600) as client:
        chats = [[{"role": "user", "content": PROMPTS[index % len(PROMPTS)]}] for index in range(num_streams)]
        await client.chat(chats[0], SamplingParams(temperature=0.0, max_tokens=4))
        began = time.perf_counter()
        results = await asyncio.gather(*(client.chat(chat, sampling) for chat in chats))
        return [each.choices[0].token_ids for each in results], time.perf_counter() - began
