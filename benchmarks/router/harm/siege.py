"""Runs 64 streams of a real cluster beside 100 connections that send bytes in many framings, for ten minutes.

    python -m benchmarks.router.harm.siege                                   14 minutes
    python -m benchmarks.router.harm.siege --seconds 60 --connections 20     shorter
    python -m benchmarks.router.harm.siege --layers http,http2,grpc          HTTP/2 frames, too

SmolLM2 behind one router (`octavo up`). Each of the streams asks for 96 greedy tokens again and again. What it got in
the first, quiet quarter of the time is what it must get in the siege. gap_ms is the longest that a stream waited
between two messages. Prints a line for each phase, and exits 1 if a process has ended, a stream differs or failed, a
gap in the siege is more than 0.2 s above the longest quiet one, or the router's memory does not come back to 1.1 times
what it was.

The workers have the last core to themselves, everything else the others: what is measured is the router, not who gets
the processor. All senders take a share of one core at most (on this machine; a real flood has its own).
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field

import httpx
import psutil

from benchmarks.cluster.up import LOCAL, ROOT, serving
from benchmarks.router.harm.framing import Pings
from octavo import AsyncClient, Delta, SamplingParams
from tests.support.ports import free_port

_STREAMS, _TOKENS = 64, 96
_MOST_MORE_S, _MOST_MEMORY = 0.2, 1.1
# For connections to end, and for memory to be given back, after the siege.
_SETTLE_S = 40.0


@dataclass(slots=True)
class Phase:
    name: str
    seconds: float = 0.0
    num_streams: int = 0
    num_different: int = 0
    num_failed: int = 0
    gap_ms: float = 0.0
    ping_ms: float = 0.0
    failures: list[str] = field(default_factory=list)


class Streams:
    def __init__(self, port: int, http_port: int) -> None:
        self._target, self._http_port = f"localhost:{port}", http_port
        self._expected: dict[int, tuple[int, ...]] = {}

    async def run(self, name: str, seconds: float) -> Phase:
        phase, until = Phase(name), time.monotonic() + seconds
        began, pings = time.monotonic(), Pings(self._http_port)
        pings.start()
        async with AsyncClient(self._target, timeout=300) as client:
            await asyncio.gather(*(self._one(client, number, phase, until) for number in range(_STREAMS)))
        await asyncio.to_thread(pings.stop)
        phase.seconds, phase.ping_ms = time.monotonic() - began, 1000 * pings.longest_s
        return phase

    async def _one(self, client: AsyncClient, number: int, phase: Phase, until: float) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)
        while time.monotonic() < until:
            last = 0.0
            try:
                async with client.stream([1000 + number, 1001, 1002], sampling) as stream:
                    async for event in stream:
                        now = time.monotonic()
                        if isinstance(event, Delta):
                            phase.gap_ms = max(phase.gap_ms, 1000 * (now - last) if last else 0.0)
                            last = now
                    tokens = tuple(stream.generation.choices[0].token_ids)
            except Exception as error:  # noqa: BLE001 - any error is a finding
                phase.num_failed += 1
                if (failure := f"{type(error).__name__}: {error}"[:200]) not in phase.failures:
                    phase.failures.append(failure)
                await asyncio.sleep(1)
                continue
            phase.num_streams += 1
            phase.num_different += self._expected.setdefault(number, tokens) != tokens


def _children(up: subprocess.Popen[bytes]) -> dict[str, psutil.Process]:
    found = {}
    for child in psutil.Process(up.pid).children(recursive=True):
        command = child.cmdline()
        if "-m" in command and (name := command[command.index("-m") + 1]) in ("router", "scheduler", "worker"):
            found[name if name == "router" else f"{name} {child.pid}"] = child
    return found


def _use_http(port: int) -> None:
    """Has the router load what HTTP needs, so that its memory can be compared."""
    for path, body in (
        ("completions", {"prompt": "One", "max_tokens": 4}),
        ("completions", {"prompt": "One", "max_tokens": 4, "stream": True}),
        ("completions", {"prompt": " " * 2**20, "max_tokens": 4}),
        ("chat/completions", {"messages": [{"role": "user", "content": "One"}], "max_tokens": 4, "stream": True}),
    ):
        httpx.post(f"http://127.0.0.1:{port}/v1/{path}", json=body, timeout=60)


def _place(up: subprocess.Popen[bytes]) -> None:
    """Gives the workers the last core, and everything else, this process too, the others."""
    *others, last = sorted(os.sched_getaffinity(0))
    for process in (psutil.Process(), psutil.Process(up.pid), *psutil.Process(up.pid).children(recursive=True)):
        is_worker = "worker" in process.cmdline()
        for thread in process.threads():
            # Threads that have ended meanwhile need none.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, [last] if is_worker or not others else others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of the siege; a quarter more before it, quietly")
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--layers", default="http", help="of http, http2 and grpc; default: %(default)s")
    parser.add_argument("--share", type=float, default=0.25, help="of one core, for all senders; default: %(default)s")
    arguments = parser.parse_args()
    port, http_port = free_port(), free_port()
    flags = (f"--config={LOCAL}", f"--port={port}", f"--http-port={http_port}", "--log-level=warning")
    command = [
        *(sys.executable, "-m", "benchmarks.router.harm.framings", f"--port={port}", f"--http-port={http_port}"),
        *(f"--connections={arguments.connections}", f"--seconds={arguments.seconds}"),
        *(f"--layers={arguments.layers}", f"--share={arguments.share}"),
    ]
    with serving(*flags) as (up, _):
        _place(up)
        before = _children(up)
        streams = Streams(port, http_port)
        _use_http(http_port)
        quiet = asyncio.run(streams.run("quiet", max(arguments.seconds / 4, 30)))
        memory = before["router"].memory_info().rss
        with subprocess.Popen(command, cwd=ROOT):
            siege = asyncio.run(streams.run("siege", arguments.seconds))
        peak = before["router"].memory_info().rss
        time.sleep(_SETTLE_S)
        after = asyncio.run(streams.run("after", 20))
        kept = before["router"].memory_info().rss if before["router"].is_running() else 0
        ended = [name for name, process in before.items() if not process.is_running()]
    for phase in (quiet, siege, after):
        print(json.dumps({name: getattr(phase, name) for name in Phase.__slots__}), flush=True)
    print(json.dumps({"ended": ended, "router_mib": [round(each / 2**20) for each in (memory, peak, kept)]}))
    phases = (quiet, siege, after)
    is_bad = (
        bool(ended)
        or any(phase.num_different or phase.num_failed for phase in phases)
        or siege.gap_ms > quiet.gap_ms + 1000 * _MOST_MORE_S
        or kept > _MOST_MEMORY * memory
    )
    sys.exit(1 if is_bad else 0)


if __name__ == "__main__":
    main()
