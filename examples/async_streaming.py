"""Streams several requests at once, in this process, and aborts one: python examples/async_streaming.py"""

import asyncio
from typing import Any

from octavo import AsyncLLM, FinishReason, Generation, SamplingParams

PROMPTS = ["The color of the sky is", "Count: 1, 2, 3,", "Never ending story:"]


async def follow(llm: AsyncLLM, number: int) -> Generation:
    """Prints an output as it grows."""
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    last, num_characters = None, 0
    async for output in llm.generate(PROMPTS[number], sampling, request_id=f"request-{number}"):
        if new := output.text[num_characters:]:
            print(f"request-{number}: {new!r}")
        last, num_characters = output, len(output.text)
        if number == 2 and output.choices[0].finish_reason is None:
            await llm.abort(f"request-{number}")
    assert last is not None
    return last


async def stream_all(**options: Any) -> list[Generation]:
    async with AsyncLLM(**options) as llm:
        return await asyncio.gather(*(follow(llm, number) for number in range(len(PROMPTS))))


def main(**options: Any) -> list[Generation]:
    results = asyncio.run(stream_all(**options))
    ended = [result.choices[0].finish_reason for result in results]
    print(f"{ended.count(FinishReason.CANCELLED)} of {len(ended)} requests were aborted")
    return results


if __name__ == "__main__":
    main()
