"""Measures what HTTP costs beside gRPC: tokens/s at 64 streams, and requests/s of one token each.

    python -m benchmarks.cluster.http_cost                     a router over a scheduler that computes nothing
    python -m benchmarks.cluster.http_cost --real              a whole cluster with SmolLM2, then vLLM and llama-server,
                                                               where they are installed
    python -m benchmarks.cluster.http_cost --before DIR        also the router, or cluster, of another checkout
    python -m benchmarks.cluster.http_cost --rounds 5 --json   medians of more rounds; a line of JSON a figure
    python -m benchmarks.cluster.http_cost --streams 8         fewer at once

The requests are those of `octavo bench serve`, sent by this process: prompts of 128 token ids (words, for chats), 128
tokens out (--real: 64), 64 at once; then 128 in, 1 out. The APIs take turns in each round, and figures are medians.
router_us is the processor time of the router's process for a token or a request; it is lower where several tokens wait
for the client, because they travel in one event (tokens_per_event). ratio compares tokens or requests with gRPC's.
client_cpu is the share of a core that this process takes: near 1, it is the limit. The router has one core, and its
scheduler and this process have the others. Takes a minute, with --real three.
"""

import argparse
import asyncio
import contextlib
import math
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.cluster.up import ROOT, serving
from benchmarks.command import show
from benchmarks.peers.prepare_models import prepare
from benchmarks.peers.server_process import end, running_server
from benchmarks.peers.servers import servers
from octavo.bench.backends.base import Backend
from octavo.bench.backends.grpc_calls import GrpcBackend
from octavo.bench.backends.openai_http import OpenAIBackend
from octavo.bench.serve import Load, measure
from octavo.cluster.serving import wait_until_serving
from tests.support.ports import free_port

STREAMS, PROMPT_LEN = 64, 128
_READY_S = 120.0
_GRPC = "grpc"
# A program of the checkout that the router is from: both speak the same protocol.
_SCHEDULER = """
import asyncio, sys
from tests.fakes.scheduler import FakeScheduler

async def main():
    scheduler = FakeScheduler(sys.argv[1])
    await scheduler.start()
    await asyncio.Event().wait()

asyncio.run(main())
"""
# Without the usage so far in each event, which older routers refuse.
_PLAIN = {"stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. router: the process whose time counts; None: unknown. apis: by the names in the figures."""

    name: str
    router: psutil.Process | None
    apis: dict[str, Callable[[], Backend]]
    # Its ports for gRPC and HTTP; 0: unknown.
    port: int = 0
    http_port: int = 0


@dataclass(slots=True)
class Figures:
    """Figures of one API under one kind of load: a value for each round."""

    per_second: list[float] = field(default_factory=list)
    router_us: list[float] = field(default_factory=list)
    client_cpu: list[float] = field(default_factory=list)
    tokens_per_event: list[float] = field(default_factory=list)


def _octavo(name: str, port: int, http_port: int, router: psutil.Process) -> Server:
    url = f"http://127.0.0.1:{http_port}"
    apis: dict[str, Callable[[], Backend]] = {
        "completions": lambda: OpenAIBackend(url, is_chat=False, extra_body=_PLAIN),
        "chat": lambda: OpenAIBackend(url, is_chat=True, extra_body=_PLAIN),
    }
    return Server(name, router, {_GRPC: lambda: GrpcBackend(f"127.0.0.1:{port}"), **apis}, port, http_port)


@contextlib.contextmanager
def fake_cluster(name: str, source: Path, *flags: str, ca: Path | None = None) -> Iterator[Server]:
    """Runs the router of a checkout over a scheduler that computes nothing. flags: more of the router's. ca: of its
    certificate, if it has one."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        address, port, http_port = f"unix:{directory}/scheduler.sock", free_port(), free_port()
        scheduler = [sys.executable, "-c", _SCHEDULER, address]
        stack.enter_context(_process(scheduler, source, cores[1:] or cores))
        command = [
            *(sys.executable, "-m", "router", f"--port={port}", f"--http-port={http_port}", "--metrics-port=0"),
            *(f"--scheduler-addresses={address}", "--served-model-name=test-model", "--log-level=error", *flags),
        ]
        router = stack.enter_context(_process(command, source, cores[:1]))
        if ca is None:
            asyncio.run(asyncio.wait_for(wait_until_serving(f"127.0.0.1:{port}"), _READY_S))
        else:
            _await_https(http_port, ca)
        yield _octavo(name, port, http_port, psutil.Process(router.pid))


def _await_https(port: int, ca: Path) -> None:
    until, context = time.monotonic() + _READY_S, ssl.create_default_context(cafile=ca)
    while time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"https://127.0.0.1:{port}/health", verify=context).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"port {port} does not serve HTTPS")


@contextlib.contextmanager
def real_cluster(name: str, source: Path) -> Iterator[Server]:
    """Runs `octavo up` of a checkout with one replica."""
    port, http_port = free_port(), free_port()
    flags = (f"--port={port}", f"--http-port={http_port}", f"--max-num-seqs={STREAMS}")
    with serving(*flags, source=source) as (up, _):
        children = psutil.Process(up.pid).children(recursive=True)
        router = next(each for each in children if each.cmdline()[1:3] == ["-m", "router"])
        yield _octavo(name, port, http_port, router)


@contextlib.contextmanager
def _process(command: Sequence[str], source: Path, cores: Sequence[int]) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": str(source)}
    process = subprocess.Popen(command, cwd=source, env=environment)
    psutil.Process(process.pid).cpu_affinity(list(cores))
    try:
        yield process
    finally:
        end(process)


class Run:
    def __init__(
        self, rounds: int, streams: int, turns: int, output_len: int, num_requests: int, *, as_json: bool
    ) -> None:
        """streams: requests at once. turns: requests of each stream. num_requests: those of one token."""
        self._rounds, self._as_json = rounds, as_json
        self._loads = {
            "token": Load(num_requests=turns * streams, rate=math.inf, concurrency=streams, output_len=output_len),
            "request": Load(num_requests=num_requests, rate=math.inf, concurrency=streams, output_len=1),
        }
        self._seed = 0

    def compare(self, running: Sequence[Server]) -> None:
        """Measures all servers' APIs in turn, and prints their figures."""
        for unit, load in self._loads.items():
            found = {(server.name, api): Figures() for server in running for api in server.apis}
            for number in range(-1, self._rounds):
                for server in running:
                    for api, backend in server.apis.items():
                        # The first round warms up.
                        figures = found[server.name, api] if number >= 0 else Figures()
                        self._measure(unit, load, server, backend(), figures)
            self._print(unit, found)

    def _measure(self, unit: str, load: Load, server: Server, backend: Backend, figures: Figures) -> None:
        self._seed += load.num_requests
        before = _cpu_seconds(server.router)
        own = Load(
            num_requests=load.num_requests,
            rate=load.rate,
            concurrency=load.concurrency,
            prompt_len=PROMPT_LEN,
            output_len=load.output_len,
            seed=self._seed,
        )
        report = asyncio.run(measure(own, backend, lambda trace: None))
        cpu = _cpu_seconds(server.router) - before
        shown: dict[str, Any] = report.as_json()
        if shown["num_errors"]:
            errors = [trace.error for trace in report.traces if trace.error]
            raise SystemExit(f"{server.name}: {len(errors)} requests failed; the first: {errors[0]}")
        count = sum(trace.num_tokens for trace in report.traces) if unit == "token" else len(report.traces)
        figures.per_second.append(count / report.duration)
        figures.router_us.append(cpu / count * 1e6)
        figures.client_cpu.append(shown["client_cpu"])
        num_events = sum(len(trace.token_times) for trace in report.traces)
        figures.tokens_per_event.append(sum(trace.num_tokens for trace in report.traces) / num_events)

    def _print(self, unit: str, found: dict[tuple[str, str], Figures]) -> None:
        base = next((figures for (_, api), figures in found.items() if api == _GRPC), None)
        for (server, api), figures in found.items():
            row: dict[str, Any] = {
                "server": server,
                "api": api,
                f"{unit}s_per_s": round(statistics.median(figures.per_second)),
                "router_us": round(statistics.median(figures.router_us), 1),
                "tokens_per_event": round(statistics.median(figures.tokens_per_event), 2),
                "client_cpu": round(statistics.median(figures.client_cpu), 2),
            }
            if base is not None:
                row["ratio"] = round(statistics.median(figures.per_second) / statistics.median(base.per_second), 3)
            show(row, as_json=self._as_json)


def _cpu_seconds(process: psutil.Process | None) -> float:
    if process is None:
        return math.nan
    times = process.cpu_times()
    return times.user + times.system


def _peers() -> Iterator[contextlib.AbstractContextManager[Server]]:
    prepare()
    for spec in servers("none", os.cpu_count() or 1):
        if spec.program.exists():
            yield _peer(spec.name, spec.command, dict(spec.environment))
        else:
            print(f"{spec.name} is left out: it is not installed; run {spec.installed_by}", file=sys.stderr)


@contextlib.contextmanager
def _peer(name: str, command: Sequence[str], environment: dict[str, str]) -> Iterator[Server]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running_server([*command, "--port", str(port)], f"{url}/health", environment=environment):
        yield Server(name, None, {"completions": lambda: OpenAIBackend(url, is_chat=False)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="a whole cluster, and the peers that are installed")
    parser.add_argument("--before", type=Path, help="another checkout, whose router is measured, too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--streams", type=int, default=STREAMS, help="requests at once; default: %(default)s")
    arguments = parser.parse_args()
    streams = arguments.streams
    sources = {"octavo": ROOT} | ({} if arguments.before is None else {"before": arguments.before.resolve()})
    if arguments.real:
        run = Run(arguments.rounds, streams, 1, 64, 2 * streams, as_json=arguments.json)
        with contextlib.ExitStack() as stack:
            # One works while the other waits.
            run.compare([stack.enter_context(real_cluster(name, source)) for name, source in sources.items()])
        # One after the other: each takes all cores.
        for starting in _peers():
            with starting as server:
                run.compare([server])
        return
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(fake_cluster(name, source)) for name, source in sources.items()]
        if len(cores) > 1:
            os.sched_setaffinity(0, cores[1:])
        turns = max(2, 64 // streams)
        Run(arguments.rounds, streams, turns, 128, 16 * STREAMS, as_json=arguments.json).compare(running)


if __name__ == "__main__":
    main()
