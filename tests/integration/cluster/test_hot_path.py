"""A plain token's way through router, scheduler and worker stays short: a feature that it does not use is not asked.

`python -m benchmarks.cluster.hot_path_files` shows the way with a real model. Here a fake one computes, and each step
waits until the client has the token before, so that the counts do not depend on the machine.
"""

import asyncio
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from protos import inference_pb2 as pb
from tests.fakes.routers import running_router
from tests.support.repository import ROOT
from tests.support.scheduler.scheduling import make_options, running_scheduler, running_worker

_NUM_TOKENS, _FIRST = 48, 16
# Files and calls of Python functions between two tokens. Raise them only for what every token needs.
_MOST_FILES, _MOST_CALLS = 41, 330
_PACKAGES = ("configs", "kernels", "octavo", "router", "runtime", "scheduler", "worker")


class Calls:
    """Counts calls of the product's functions by file, in this thread and those that begin meanwhile."""

    def __init__(self) -> None:
        self._files: Counter[str] = Counter()
        self._places = tuple(f"{ROOT}/{package}/" for package in _PACKAGES)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (file := frame.f_code.co_filename).startswith(self._places):
            self._files[file] += 1

    def take(self) -> Counter[str]:
        """Returns the calls since the last call of this method."""
        files, self._files = self._files, Counter()
        return files


@contextmanager
def _counting() -> Iterator[Calls]:
    calls = Calls()
    before = sys.getprofile()
    threading.setprofile(calls)
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


async def test_a_token_crosses_few_files(tmp_path: Path) -> None:
    options, turn = make_options(tmp_path), threading.Semaphore(2)
    gaps = []
    with _counting() as calls:
        async with (
            asyncio.timeout(60),
            running_scheduler(options),
            running_worker(options, before_step=lambda _: turn.acquire(timeout=60)),
            running_router([options.scheduler_address(0)], model_name="hashes") as (server, stub),
        ):
            await server.wait_ready()
            sampling = pb.SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), sampling=sampling)
            async for response in stub.Generate(request):
                turn.release()
                # All that a token causes, also behind the message.
                await asyncio.sleep(0.05)
                gaps.append((response.WhichOneof("event"), calls.take()))
    found = [gap for event, gap in gaps[_FIRST:] if event == "chunk"]
    files = Counter(file for gap in found for file in gap)
    crossed = sorted(str(Path(file).relative_to(ROOT)) for file, count in files.items() if 2 * count >= len(found))
    num_calls = statistics.median(sum(gap.values()) for gap in found)
    assert len(crossed) <= _MOST_FILES, crossed
    assert num_calls <= _MOST_CALLS
