"""Measures the latency that a router adds to a token, and how many tokens a second it passes on with one core.

    python -m benchmarks.router.cost --json                     a line for each load
    python -m benchmarks.router.cost --loads 1000x60 --rounds 1 some of them: streams x steps a second
    python -m benchmarks.router.cost --loads 10000x6 --streams-a-scheduler 10000,1000   one scheduler against ten
    python -m benchmarks.router.cost --floor                    also a bare grpc.aio server in the router's place

The router is a real one (`python -m router`), pinned to one core. The other cores run its schedulers, one for each
1,000 streams, which compute nothing (fake_scheduler.py), and its clients, which only read frames (http2.py). In each
step every stream gets a token, and all tokens of a scheduler's step travel in one message.

Latency added: from the arrival of a step at a client that reads a Session itself to the arrival of its token at each
stream's client. Both read in the same way, with the same clock. Throughput: tokens that arrived at clients while the
load lasted. cpu: seconds of the router's process in each second, so that tokens_per_cpu_s holds even where another
process took turns on its core. Figures are medians of the rounds. Takes 7 minutes; the machine should be quiet.
"""

import argparse
import asyncio
import contextlib
import json
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import psutil

from benchmarks.command import numbers, rounded, show
from benchmarks.peers.server_process import end
from benchmarks.router import fake_scheduler
from benchmarks.router.http2 import Call, Connection
from octavo.cluster.serving import wait_until_serving
from protos import inference_pb2 as pb
from protos import scheduler_pb2 as wire
from runtime.wire import PROTOCOL_VERSION
from tests.support.ports import free_port

# Streams x steps a second: light loads, and loads of 60,000 tokens/s.
LOADS = ((64, 20), (1000, 1), (1000, 60), (4000, 1), (4000, 15), (10_000, 0.5), (10_000, 6))
_STREAMS_A_CONNECTION, _STREAMS_A_SCHEDULER = 100, 1000
_PROMPT_TOKENS = 16
_WARM_S, _WARM_S_A_STREAM = 1.0, 0.001
_READY_S, _SILENCE_S = 30.0, 60.0

# The router's core, and the others.
_Cores = tuple[int, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The figures of one load, or medians of several. Latencies in milliseconds; tokens a second."""

    server: str
    schedulers: int
    streams: int
    steps_per_s: float
    offered: float
    tokens_per_s: float
    cpu: float
    tokens_per_cpu_s: float
    tokens_per_message: float
    cpu_us_per_message: float
    added_p50_ms: float
    added_p99_ms: float
    rss_mib: float


class Bench:
    """A server under load. Use as a context manager."""

    def __init__(self, server: str, num_schedulers: int, core: int, others: Sequence[int]) -> None:
        """server: router or floor. core: the server's only core. others: the cores of its schedulers."""
        self._server, self._num_schedulers, self._core, self._others = server, num_schedulers, core, others
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Bench":
        directory = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._addresses = [f"unix:{directory}/scheduler-{number}.sock" for number in range(self._num_schedulers)]
        self._driver = self._stack.enter_context(
            _process([sys.executable, "-m", "benchmarks.router.fake_scheduler", *self._addresses], self._others)
        )
        self._answer()
        self._port = free_port()
        command = {
            "router": [
                *("-m", "router", f"--port={self._port}", "--http-port=0", "--metrics-port=0"),
                *(
                    f"--scheduler-addresses={','.join(self._addresses)}",
                    f"--data-parallel-size={self._num_schedulers}",
                    f"--served-model-name={fake_scheduler.MODEL_NAME}",
                ),
                *(
                    "--log-level=error",
                    "--drain-timeout=0",
                ),
            ],
            "floor": ["-m", "benchmarks.router.floor", str(self._port), *self._addresses],
        }[self._server]
        process = self._stack.enter_context(_process([sys.executable, *command], [self._core]))
        self._process = psutil.Process(process.pid)
        asyncio.run(asyncio.wait_for(wait_until_serving(f"127.0.0.1:{self._port}"), _READY_S))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, num_streams: int, rate: float, seconds: float) -> Cost:
        """Measures one load of `rate` steps a second for `seconds`, once all streams run."""
        mirror = Connection(self._addresses[0])
        opening = wire.Open(protocol_version=PROTOCOL_VERSION, router_id=fake_scheduler.MIRROR)
        opening_bytes = wire.RouterMessage(open=opening).SerializeToString()
        direct = mirror.call(f"/{fake_scheduler.SERVICE}/{fake_scheduler.METHOD}", opening_bytes, more=True)
        connections = [Connection(f"127.0.0.1:{self._port}") for _ in range(-(-num_streams // _STREAMS_A_CONNECTION))]
        sampling = pb.SamplingParams(temperature=0.0, max_tokens=fake_scheduler.MAX_TOKENS, ignore_eos=True)
        request = pb.GenerateRequest(sampling=sampling)
        request.token_ids.ids.extend(range(1000, 1000 + _PROMPT_TOKENS))
        request_bytes = request.SerializeToString()
        self._command({"streams": num_streams, "rate": rate})
        reader = _Reader([mirror, *connections])
        calls: list[Call] = []
        for connection in connections:
            added = [
                connection.call("/octavo.v1.Inference/Generate", request_bytes)
                for _ in range(min(_STREAMS_A_CONNECTION, num_streams - len(calls)))
            ]
            # Until each call has got Started.
            reader.read_until(lambda added=added: all(call.messages or call.ended for call in added))
            calls += added
        reader.read_until(lambda: any(_has_outputs(message) for _, message in direct.messages))
        # Warms up: the first step finds the router idle, but the second one finds it with much to write.
        reader.read_for(_WARM_S + num_streams * _WARM_S_A_STREAM)
        began, cpu_began = time.monotonic(), self._cpu_seconds
        reader.read_for(seconds)
        cpu, rss = self._cpu_seconds - cpu_began, self._process.memory_info().rss
        ended = time.monotonic()
        failed = [call.ended for call in calls if call.ended]
        if failed:
            raise SystemExit(f"{len(failed)} of {num_streams} calls failed; the first one: {failed[0]!r}")
        for connection in connections:
            connection.close()
        self._answer()
        mirror.close()
        return self._cost(direct, calls, num_streams, rate, (began, ended), cpu, rss)

    def _cost(
        self,
        direct: Call,
        calls: Sequence[Call],
        num_streams: int,
        rate: float,
        window: tuple[float, float],
        cpu: float,
        rss: int,
    ) -> Cost:
        at_mirror = _step_arrivals(direct)
        began, ended = window
        num_tokens, num_messages, late = 0, 0, []
        for call in calls:
            for at, message in call.messages:
                response = pb.GenerateResponse.FromString(message)
                if began <= at < ended and response.HasField("chunk"):
                    chunk = response.chunk
                    num_messages += 1
                    num_tokens += len(chunk.token_ids)
                    first = chunk.first_token
                    late += [at - at_mirror[step] for step in range(first, first + len(chunk.token_ids))]
        p50, p99 = np.percentile(late, (50, 99)) * 1e3
        seconds = ended - began
        return Cost(
            server=self._server,
            schedulers=self._num_schedulers,
            streams=num_streams,
            steps_per_s=rate,
            offered=num_streams * rate,
            tokens_per_s=num_tokens / seconds,
            cpu=cpu / seconds,
            tokens_per_cpu_s=num_tokens / cpu,
            tokens_per_message=num_tokens / num_messages,
            cpu_us_per_message=cpu / num_messages * 1e6,
            added_p50_ms=float(p50),
            added_p99_ms=float(p99),
            rss_mib=rss / 2**20,
        )

    @property
    def _cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    def _command(self, command: dict[str, float]) -> None:
        assert self._driver.stdin is not None
        self._driver.stdin.write(json.dumps(command).encode() + b"\n")
        self._driver.stdin.flush()

    def _answer(self) -> bytes:
        assert self._driver.stdout is not None
        line = self._driver.stdout.readline()
        if not line:
            raise SystemExit("the benchmark's scheduler has ended; see its output above")
        return line


class _Reader:
    """Reads many connections on one thread."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._selector = selectors.DefaultSelector()
        for connection in connections:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def read_for(self, seconds: float) -> None:
        end_at = time.monotonic() + seconds
        while (left := end_at - time.monotonic()) > 0:
            self._read(left)

    def read_until(self, condition) -> None:
        give_up_at = time.monotonic() + _SILENCE_S
        while not condition():
            self._read(0.1)
            if time.monotonic() > give_up_at:
                raise SystemExit(f"the server under load has not answered in {_SILENCE_S:g} s")

    def _read(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if not key.data.read():
                raise SystemExit("the server under load has closed a connection")


def _has_outputs(message: bytes) -> bool:
    return wire.SchedulerMessage.FromString(message).HasField("outputs")


def _step_arrivals(direct: Call) -> dict[int, float]:
    """Arrival time of each step at the client that reads the Session itself."""
    arrivals: dict[int, float] = {}
    for at, message in direct.messages:
        for step in set(wire.SchedulerMessage.FromString(message).outputs.first_tokens):
            arrivals[step] = at
    return arrivals


@contextlib.contextmanager
def _process(command: Sequence[str], cores: Sequence[int]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process on these cores only; leaving the context ends it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).resolve().parents[2]
        )
    finally:
        os.sched_setaffinity(0, before)
    try:
        yield process
    finally:
        end(process)


def _median(costs: Sequence[Cost]) -> Cost:
    rows = [asdict(cost) for cost in costs]
    medians = {
        name: statistics.median(row[name] for row in rows)
        for name, value in rows[0].items()
        if isinstance(value, float)
    }
    return replace(costs[0], **medians)


def _print(cost: Cost, *, as_json: bool, round_number: int | None = None) -> None:
    """round_number: None for medians."""
    number = {} if round_number is None else {"round": round_number}
    show(number | rounded(asdict(cost), 3), as_json=as_json)


def _load(text: str) -> tuple[int, float]:
    streams, _, rate = text.partition("x")
    return int(streams), float(rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=lambda text: [_load(each) for each in text.split(",")], default=LOADS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--floor", action="store_true")
    parser.add_argument("--streams-a-scheduler", type=numbers, default=[_STREAMS_A_SCHEDULER])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    core, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise SystemExit("this needs two cores: one for the router, one for its schedulers and clients")
    os.sched_setaffinity(0, others)
    for streams, rate in arguments.loads:
        # The floor reads only one Session.
        setups = [("floor", 1)] if arguments.floor else []
        setups += [("router", -(-streams // size)) for size in arguments.streams_a_scheduler]
        costs = _measure(setups, streams, rate, arguments, (core, others))
        for each in costs:
            _print(_median(each), as_json=arguments.json)
        first, *rest = costs[-len(arguments.streams_a_scheduler) :]
        for other in rest:
            _compare(first, other, as_json=arguments.json)


def _measure(
    setups: Sequence[tuple[str, int]], streams: int, rate: float, arguments: argparse.Namespace, cores: _Cores
) -> list[list[Cost]]:
    """Returns the rounds of each setup: a server and its number of schedulers. A single setup starts once; several take
    turns, each with new processes."""
    costs: list[list[Cost]] = [[] for _ in setups]
    core, others = cores
    in_a_row = arguments.rounds if len(setups) == 1 else 1
    for number in range(arguments.rounds // in_a_row):
        for (server, num_schedulers), found in zip(setups, costs, strict=True):
            with Bench(server, num_schedulers, core, others) as bench:
                found += [bench.measure(streams, rate, arguments.seconds) for _ in range(in_a_row)]
            if len(setups) > 1:
                _print(found[-1], as_json=arguments.json, round_number=number + 1)
    return costs


def _compare(first: Sequence[Cost], other: Sequence[Cost], *, as_json: bool) -> None:
    """Prints how many tokens the first setup passes on, as a share of the other's in the same round."""
    shares = [one.tokens_per_s / ten.tokens_per_s for one, ten in zip(first, other, strict=True)]
    row = {
        "streams": first[0].streams,
        "steps_per_s": first[0].steps_per_s,
        "schedulers": [first[0].schedulers, other[0].schedulers],
        "tokens_per_s": [
            [round(one.tokens_per_s), round(ten.tokens_per_s)] for one, ten in zip(first, other, strict=True)
        ],
        "share": round(statistics.median(shares), 3),
        "shares": [round(each, 3) for each in shares],
    }
    show(row, as_json=as_json)


if __name__ == "__main__":
    main()
