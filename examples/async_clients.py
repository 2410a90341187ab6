"""Sends many requests to a running cluster at once: python examples/async_clients.py [HOST:PORT]

`make run` or `octavo up` starts one. Streams continue where they were if a connection or a server is lost.
"""

import asyncio
import sys

from octavo import AsyncClient, Generation, SamplingParams

PROMPTS = [f"Write a sentence about the number {number}." for number in range(16)]


async def ask_all(target: str) -> list[Generation]:
    sampling = SamplingParams(temperature=0, max_tokens=12)
    async with AsyncClient(target, timeout=60) as client:
        return await asyncio.gather(*(client.generate(prompt, sampling) for prompt in PROMPTS))


async def main(target: str = "localhost:50051") -> list[Generation]:
    results = await ask_all(target)
    for prompt, result in zip(PROMPTS, results, strict=True):
        print(f"{prompt} {result.text!r}")
    return results


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
