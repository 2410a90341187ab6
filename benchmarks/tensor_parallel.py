"""SmolLM2 on one rank and on several: the same greedy tokens, and how fast each says them.

    python -m benchmarks.tensor_parallel [--sizes 1,3] [--tokens 32] [--streams 4] [--json]

Each size is a cluster of one replica, `octavo up` with real processes. Exits 1 if tokens differ. Ranks share the cores:
on a machine of few cores more ranks are slower; what is shown is that they say the same, and what a step's sums cost.
"""

import argparse
import asyncio
import json
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


def main() -> int:
    parser = argparse.ArgumentParser(description="One rank beside several.")
    parser.add_argument("--sizes", default="1,3", help="tensor_parallel_size of each cluster, with commas between")
    parser.add_argument("--tokens", type=int, default=32, help="of each stream")
    parser.add_argument("--streams", type=int, default=len(PROMPTS), help="at once")
    parser.add_argument("--port", type=int, default=50961)
    parser.add_argument("--json", action="store_true", help="a line for each size")
    arguments = parser.parse_args()
    said: list[list[tuple[int, ...]]] = []
    for size in map(int, arguments.sizes.split(",")):
        with _cluster(size, arguments.port):
            tokens, seconds = asyncio.run(_say(arguments.port, arguments.streams, arguments.tokens))
        said.append(tokens)
        rate, is_equal = arguments.streams * arguments.tokens / seconds, tokens == said[0]
        if arguments.json:
            print(json.dumps({"tensor_parallel_size": size, "tokens_per_s": round(rate, 2), "equal": is_equal}))
        else:
            print(f"tensor_parallel_size {size}: {rate:6.1f} tokens/s, tokens {'equal' if is_equal else 'DIFFER'}")
    return 0 if all(tokens == said[0] for tokens in said) else 1


@contextmanager
def _cluster(size: int, port: int) -> Iterator[None]:
    """In float32, so that sums in another order choose another token only where two are equal to 7 digits."""
    with tempfile.TemporaryDirectory() as directory:
        up = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("octavo")), "up", f"--tensor-parallel-size={size}"),
                *("--dtype=float32", "--kv-cache-memory=0.1", "--worker-threads=1", f"--port={port}"),
                *("--metrics-port=0", f"--runtime-dir={directory}/runtime"),
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


async def _say(port: int, num_streams: int, num_tokens: int) -> tuple[list[tuple[int, ...]], float]:
    """Each stream's tokens, and the seconds of all."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    async with AsyncClient(f"localhost:{port}", timeout=600) as client:
        chats = [[{"role": "user", "content": PROMPTS[index % len(PROMPTS)]}] for index in range(num_streams)]
        await client.chat(chats[0], SamplingParams(temperature=0.0, max_tokens=4))
        began = time.perf_counter()
        results = await asyncio.gather(*(client.chat(chat, sampling) for chat in chats))
        return [each.choices[0].token_ids for each in results], time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
