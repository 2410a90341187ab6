"""Streams one output while a long prompt comes in, with and without chunked prefill: python examples/chunked_prefill.py

Without chunked prefill the stream waits while the whole prompt is computed. With it, each step has a part of the prompt
and the stream's next token: the longest gap between two tokens is that of one step. The outputs are the same.
"""

import asyncio
import time
from typing import Any

from octavo import AsyncLLM, SamplingParams

LONG_PROMPT = " ".join(f"Item {number} costs {number * 7 % 90} dollars." for number in range(60))
SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {"enable_chunked_prefill": False, "max_model_len": 2048},
    "chunks of 64 tokens": {"max_num_batched_tokens": 64},
}


async def stream(llm: AsyncLLM) -> tuple[str, float]:
    """Returns a stream's text, and the longest gap between two of its tokens in seconds."""
    longest, last, text, other = 0.0, 0.0, "", None
    async for output in llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)):
        now = time.perf_counter()
        if last:
            longest = max(longest, now - last)
        last, text = now, output.text
        if other is None:
            other = asyncio.create_task(whole(llm, LONG_PROMPT))
    assert other is not None
    await other
    return text, longest


async def whole(llm: AsyncLLM, prompt: str) -> None:
    async for _ in llm.generate(prompt, SamplingParams(max_tokens=1)):
        pass


async def measure(**options: Any) -> tuple[str, float]:
    async with AsyncLLM(**options) as llm:
        return await stream(llm)


def main(**options: Any) -> dict[str, tuple[str, float]]:
    results = {name: asyncio.run(measure(**options, **setting)) for name, setting in SETTINGS.items()}
    for name, (text, longest) in results.items():
        print(f"{name}: at most {longest * 1e3:.0f} ms between two tokens; {text!r}")
    return results


if __name__ == "__main__":
    main()
