"""A cluster of SmolLM2 on the CPUs of this machine, and what it says to a few streams at once."""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo import AsyncClient, SamplingParams

PROMPTS = [
    "What is the capital of France? Answer briefly.",
    "Count from one to ten.",
    "Tell me about rain.",
    "Write a line about the sea.",
]
_SERVING = "serving; Ctrl-C to stop"


@contextmanager
def cluster(port: int, *flags: str, metrics_port: int = 0) -> Iterator[None]:
    """`octavo up` with one thread a worker. In float32, so that sums in another order choose another token only where
    two are equal to 7 digits."""
    with tempfile.TemporaryDirectory() as directory:
        up = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("octavo")), "up", *flags),
                *("--dtype=float32", "--kv-cache-memory=0.1", "--worker-threads=1", f"--port={port}"),
                *(f"--metrics-port={metrics_port}", "--http-port=0", f"--runtime-dir={directory}/runtime"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert up.stdout is not None
        try:
            for line in up.stdout:
                if _SERVING in line:
                    break
            else:
                raise SystemExit(f"`octavo up` has ended, with {up.wait()}")
            yield
        finally:
            up.terminate()
            up.communicate()


def say(port: int, num_streams: int, num_tokens: int) -> tuple[list[tuple[int, ...]], float]:
    """The greedy tokens of each stream, and the seconds of all together."""
    return asyncio.run(_say(port, num_streams, num_tokens))


async def _say(port: int, num_streams: int, num_tokens: int) -> tuple[list[tuple[int, ...]], float]:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    async with AsyncClient(f"localhost:{port}", timeout=600) as client:
        chats = [[{"role": "user", "content": PROMPTS[index % len(PROMPTS)]}] for index in range(num_streams)]
        await client.chat(chats[0], SamplingParams(temperature=0.0, max_tokens=4))
        began = time.perf_counter()
        results = await asyncio.gather(*(client.chat(chat, sampling) for chat in chats))
        return [each.choices[0].token_ids for each in results], time.perf_counter() - began
