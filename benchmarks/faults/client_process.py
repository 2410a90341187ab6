"""A process with streams of its own, which can be stopped like any other.

    python -m benchmarks.faults.client_process TARGETS SEED STREAMS TOKENS

Prints a line once all its streams have begun. When they have ended it waits for a line, asks for the same streams
undisturbed, and prints a JSON object with its verdict of each.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType

import psutil

from benchmarks.faults.crowd import Crowd, Verdict, ask_all, judge, make_plans
from tests.support.repository import ROOT

_BEGUN, _ENDED = "begun", "ended"
_PATIENCE_S = 180.0


class ClientProcess:
    """Such a process. Leaving the context ends it."""

    def __init__(self, targets: Sequence[str], seed: int, num_streams: int, *, mean_tokens: int = 24) -> None:
        self._arguments = (",".join(targets), str(seed), str(num_streams), str(mean_tokens))

    async def __aenter__(self) -> "ClientProcess":
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            *self._arguments,
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self.process = psutil.Process(self._child.pid)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child.returncode is None:
            self._child.kill()
        await self._child.communicate()

    async def wait_until_begun(self) -> None:
        """Raises TimeoutError."""
        assert await self._line() == _BEGUN

    async def verdicts(self) -> list[Verdict]:
        """Waits for the streams' ends, then has them asked once more. Raises TimeoutError."""
        assert await self._line() == _ENDED
        assert self._child.stdin is not None
        self._child.stdin.write(b"\n")
        return [Verdict(**each) for each in json.loads(await self._line())]

    async def _line(self) -> str:
        assert self._child.stdout is not None
        async with asyncio.timeout(_PATIENCE_S):
            return (await self._child.stdout.readline()).decode().strip()


async def _run(targets: list[str], seed: int, num_streams: int, mean_tokens: int) -> None:
    plans = make_plans(num_streams, seed, mean_tokens=mean_tokens)
    async with Crowd(targets, plans) as crowd:
        crowd.start(num_streams)
        await crowd.oldest_advance(num_streams)
        print(_BEGUN, flush=True)
        outcomes = await crowd.finish()
    print(_ENDED, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    expected = await ask_all(targets, [each.reference for each in outcomes])
    verdicts = [judge(*pair, crowd.began) for pair in zip(outcomes, expected, strict=True)]
    print(json.dumps([asdict(each) for each in verdicts]), flush=True)


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1].split(","), *map(int, sys.argv[2:])))
