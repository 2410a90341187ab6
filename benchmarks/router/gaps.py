"""Measures the gaps between the tokens of a live stream while a second client does its worst.

    python -m benchmarks.router.gaps                        15 s at rest, then 15 s of each kind of harm: 200 s in all
    python -m benchmarks.router.gaps --harm tokenize --json one of them; a line of JSON instead of words
    python -m benchmarks.router.gaps --real                 a cluster of SmolLM2 instead of a scheduler without a model

The router is a real one (`python -m router`). Its scheduler computes nothing and gives the stream a token every 20 ms
(fake_scheduler.py). The second client (harm/) sends what the limits allow; most kinds have four calls in
flight at any time:

    tokenize    Tokenize with texts of 1 MB
    detokenize  Detokenize with 1,048,576 tokens
    resume      resumes of 64 choices, each with 420 times the longest token, under 16 stop strings of 1,000 characters
    bodies      HTTP requests with a text of 16 MiB
    json        HTTP requests with 5 million empty lists, or 1 million lists inside each other, as template arguments
    constraints constraints as benchmarks.fuzz sends them, on two connections, and some that take seconds to refuse
    schemas     HTTP requests with schemas of 0.9 MB, one after another
    images      images in files of 15 MB, as they are and in base64, some with headers made to be slow to read
    dribble     1,000 connections that send a byte of a request every 2 s, to the HTTP port and to that of the metrics
    all         one call of each of these, and the dribbling connections

All processes share the machine's cores, and a stolen core widens the gaps, too: compare with the gaps at rest. A gap
that lasts at the end counts. With `--most SECONDS` the command exits 1 if a gap is longer.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc.aio
import numpy as np

from benchmarks.cluster.up import LOCAL, serving
from benchmarks.command import show
from benchmarks.peers.server_process import end
from benchmarks.router import fake_scheduler
from benchmarks.router.harm import attacks as harm
from octavo.cluster.serving import wait_until_serving
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from tests.support.ports import free_port, free_ports

HARMS = ("none", *harm.HARMS)
_STEPS_A_S = 50
_READY_S = 60.0
_WARM_S = 1.0
# SmolLM2's context has 8,192 tokens.
_REAL_MAX_TOKENS = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """The gaps between a stream's tokens, in milliseconds, and how the second client's calls ended."""

    harm: str
    seconds: float
    num_tokens: int
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    calls: dict[str, int]


class _Child:
    """A process of this benchmark, spoken to in lines."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def say(self, line: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} has ended; see its output above")
        return line


@contextlib.contextmanager
def _running(*command: str) -> Iterator[_Child]:
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
    )
    try:
        yield _Child(process)
    finally:
        end(process)


async def _token_times(port: int, max_tokens: int, seconds: float, second_client: _Child | None) -> list[float]:
    """When each token of a stream arrived, from the second client's start on for so many seconds; and their end."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=range(1000, 1016)),
        sampling=pb.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
    )
    times: list[float] = []
    warm_at = 0.0
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                async for message in InferenceStub(channel).Generate(request):
                    now = time.monotonic()
                    if not message.HasField("chunk"):
                        continue
                    warm_at = warm_at or now + _WARM_S
                    if now < warm_at:
                        continue
                    if not times:
                        limit.reschedule(asyncio.get_running_loop().time() + seconds)
                        if second_client is not None:
                            second_client.say()
                    times += [now] * len(message.chunk.token_ids)
            raise SystemExit("the stream ended before the measurement did")
    return [*times, time.monotonic()]


@contextlib.contextmanager
def _router(ports: harm.Ports) -> Iterator[None]:
    """A router, and a scheduler without a model that gives one stream _STEPS_A_S tokens a second."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        address = f"unix:{directory}/scheduler.sock"
        driver = stack.enter_context(_running("benchmarks.router.fake_scheduler", address))
        driver.answer()
        model = f"--served-model-name={fake_scheduler.MODEL_NAME}"
        flags = (f"--scheduler-addresses={address}", model, "--data-parallel-size=1", "--drain-timeout=0")
        stack.enter_context(_running("router", *_port_flags(ports), "--log-level=error", *flags))
        driver.say(json.dumps({"streams": 1, "rate": _STEPS_A_S}))
        yield


def _port_flags(ports: harm.Ports) -> list[str]:
    named = {"port": ports.grpc, "http-port": ports.http, "metrics-port": ports.metrics}
    return [f"--{name}={port}" for name, port in named.items()]


def measure(kind: str, seconds: float, *, is_real: bool) -> Gaps:
    """kind: one of HARMS. is_real: with a cluster of SmolLM2."""
    ports = harm.Ports(free_port(), free_port(), free_ports(5))
    with contextlib.ExitStack() as stack:
        stack.enter_context(serving(f"--config={LOCAL}", *_port_flags(ports)) if is_real else _router(ports))
        asyncio.run(asyncio.wait_for(wait_until_serving(f"127.0.0.1:{ports.grpc}"), _READY_S))
        second_client = None
        if kind != "none":
            numbers = map(str, (ports.grpc, ports.http, ports.metrics))
            second_client = stack.enter_context(_running("benchmarks.router.harm.attacks", kind, *numbers))
            second_client.answer()
        max_tokens = _REAL_MAX_TOKENS if is_real else fake_scheduler.MAX_TOKENS
        times = asyncio.run(_token_times(ports.grpc, max_tokens, seconds, second_client))
        calls = {}
        if second_client is not None:
            second_client.say()
            calls = json.loads(second_client.answer())
    gaps = [1000 * (later - earlier) for earlier, later in itertools.pairwise(times)]
    p50, p99, p999 = np.percentile(gaps, (50, 99, 99.9)).round(1).tolist()
    return Gaps(
        harm=kind,
        seconds=seconds,
        num_tokens=len(times) - 1,
        p50_ms=p50,
        p99_ms=p99,
        p999_ms=p999,
        max_ms=round(max(gaps), 1),
        calls=calls,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harm", choices=HARMS, action="append", help="default: each of them")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of each")
    parser.add_argument(
        "--real", action="store_true", help="a cluster of SmolLM2 instead of a scheduler without a model"
    )
    parser.add_argument("--most", type=float, help="exit 1 if a gap is longer, in seconds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    longest_ms = 0.0
    for kind in arguments.harm or HARMS:
        gaps = measure(kind, arguments.seconds, is_real=arguments.real)
        longest_ms = max(longest_ms, gaps.max_ms)
        show(asdict(gaps), as_json=arguments.json)
    sys.exit(1 if arguments.most is not None and longest_ms > 1000 * arguments.most else 0)


if __name__ == "__main__":
    main()
