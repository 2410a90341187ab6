"""Measures streams through a router while one of its replicas is slow, with and without a router that notices.

    python -m benchmarks.router.slow_replica                         three runs of 60 s
    python -m benchmarks.router.slow_replica --slowness 4 --replicas 8 --seconds 30 --json

The router is a real one; its schedulers compute nothing and give each stream a token in every step. Clients send one
request after the other. Runs: all replicas equally fast; one slower from the beginning, with slow_replica_factor 0; the
same with the default. Prints the gaps between tokens of all streams and the output tokens per second; a request is good
if its mean gap is at most three steps. The tokens of each request are compared with those of the replicas' function.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from protos import inference_pb2 as pb
from tests.fakes.routers import running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler, hashed_token

_STEP_S = 0.02
_NUM_TOKENS = 200
# Times the step: the longest mean gap of a good request.
_GOOD = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run. Gaps are in milliseconds, between two tokens of a stream."""

    run: str
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    tokens_per_s: float
    # Requests that ended, and the share of them that was good.
    num_requests: int
    good: float
    # Streams that left the slow replica, and requests that it got.
    num_moved: int
    num_at_slow: int


@dataclass(slots=True)
class _Gaps:
    seconds: list[float] = field(default_factory=list)
    num_good: int = 0
    num_ended: int = 0


async def _stream(stub, number: int, gaps: _Gaps) -> None:
    """Streams one request and checks its tokens."""
    sampling = pb.SamplingParams(max_tokens=_NUM_TOKENS, seed=number, ignore_eos=True)
    request = pb.GenerateRequest(prompt="Once upon a time", request_id=f"r{number}", sampling=sampling)
    known: list[int] = []
    num_prompt, began, last = 0, 0.0, 0.0
    async for response in stub.Generate(request):
        now = time.perf_counter()
        if response.HasField("started"):
            known = list(response.started.prompt_token_ids)
            num_prompt = len(known)
        elif response.HasField("chunk"):
            for token_id in response.chunk.token_ids:
                expected = hashed_token(known, num_prompt, number, 0)
                assert token_id == expected, f"request {number}: {token_id} instead of {expected}"
                known.append(token_id)
            if last:
                gaps.seconds.append(now - last)
            began, last = began or now, now
    gaps.num_ended += 1
    gaps.num_good += last - began <= _GOOD * _STEP_S * (_NUM_TOKENS - 1)


async def _keep_sending(stub, numbers: Iterator[int], gaps: _Gaps) -> None:
    while True:
        await _stream(stub, next(numbers), gaps)


async def _run(
    run: str, arguments: argparse.Namespace, directory: Path, slowness: float, options: dict[str, Any]
) -> Outcome:
    fakes = [FakeScheduler(socket_address(directory, str(i)), step_seconds=_STEP_S) for i in range(arguments.replicas)]
    fakes[0].step_seconds *= slowness
    gaps, numbers = _Gaps(), itertools.count()
    async with (
        running_schedulers(*fakes),
        running_router([fake.address for fake in fakes], **options) as (server, stub),
    ):
        await server.wait_ready()
        clients = [
            asyncio.create_task(_keep_sending(stub, numbers, gaps))
            for _ in range(arguments.replicas * arguments.streams)
        ]
        done, _ = await asyncio.wait(clients, timeout=arguments.seconds, return_when=asyncio.FIRST_COMPLETED)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        for client in done:
            client.result()
        num_moved = server.metrics.registry.get_sample_value("octavo_migrations_total", {"cause": "slow"}) or 0
    found = 1000 * np.array(gaps.seconds)
    return Outcome(
        run=run,
        p50_ms=round(float(np.percentile(found, 50)), 1),
        p99_ms=round(float(np.percentile(found, 99)), 1),
        p999_ms=round(float(np.percentile(found, 99.9)), 1),
        max_ms=round(float(found.max()), 1),
        tokens_per_s=round(len(found) / arguments.seconds, 1),
        num_requests=gaps.num_ended,
        good=round(gaps.num_good / max(gaps.num_ended, 1), 3),
        num_moved=int(num_moved),
        num_at_slow=len(fakes[0].submitted),
    )


async def _measure(arguments: argparse.Namespace) -> None:
    runs = (
        ("equal", 1.0, {}),
        ("slow, not noticed", arguments.slowness, {"slow_replica_factor": 0.0}),
        ("slow, noticed", arguments.slowness, {}),
    )
    for run, slowness, options in runs:
        with tempfile.TemporaryDirectory() as directory:
            outcome = await _run(run, arguments, Path(directory), slowness, options)
        if arguments.json:
            print(json.dumps(asdict(outcome)), flush=True)
            continue
        print(
            f"{run:18} gaps p50 {outcome.p50_ms:.0f}, p99 {outcome.p99_ms:.0f}, p99.9 {outcome.p999_ms:.0f}, longest "
            f"{outcome.max_ms:.0f} ms; {outcome.tokens_per_s:.0f} tokens/s; {100 * outcome.good:.1f}% of "
            f"{outcome.num_requests} requests good; {outcome.num_moved} streams moved; the first replica got "
            f"{outcome.num_at_slow} requests",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3, help="number of replicas (default: 3)")
    parser.add_argument("--streams", type=int, default=6, help="clients for each replica (default: 6)")
    parser.add_argument("--slowness", type=float, default=10.0, help="of one replica (default: 10 times)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run (default: 60)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each run")
    asyncio.run(_measure(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
