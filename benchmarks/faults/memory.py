"""Measures the memory of streams without a reader: a router's RSS before them, with them, and after their time.

    python -m benchmarks.faults.memory                       two rounds of 1,000 streams: 4 minutes
    python -m benchmarks.faults.memory --streams 100 --rounds 1 --seconds 20 --json

The router is a real one (`python -m router`); its scheduler computes nothing (tests/fakes/scheduler.py). Each stream
asks for 20 logprobs a token and for `detach_timeout`. Its client reads until nearly half of `stream_buffer_bytes` has
come, which the router keeps, and breaks the connection; then nearly as much is computed that nobody reads. One stream
more than `max_detached_streams` ends with its connection. After the time without a reader all are gone, and what the
allocator keeps then is there for the next round.

Prints the RSS in MiB. held: the bytes that the router counts, from a stream that was read again. of_bound: the growth
of the RSS divided by streams x stream_buffer_bytes. Exits with 1 if a stream had another state than it should.
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import grpc.aio
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.command import rounded, show
from benchmarks.peers.server_process import end
from octavo.cluster.serving import wait_until_serving
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from tests.fakes.scheduler import FakeScheduler, model_info
from tests.support.ports import free_ports
from tests.support.repository import ROOT

_LOGPROBS, _TOKENS_A_STEP = 20, 4
_AT_ONCE = 50
_READY_S, _PATIENCE_S = 30.0, 120.0
# The router has malloc give memory back 5 s after streams have gone.
_GIVES_BACK_S = 12.0
# The part of each half of the buffer that is filled: events count for more than their bytes.
_FILL = 0.8
# The first tokens of a stream, by whose size the numbers of tokens are chosen.
_TRIED = 40
_GAUGE = "octavo_detached_streams"
_CHANNEL_OPTIONS = [("grpc.max_receive_message_length", -1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The figures of one round, in MiB. tokens_read, tokens_unread: of each stream."""

    streams: int
    tokens_read: int
    tokens_unread: int
    bound_mib: float
    held_mib: float
    before_mib: float
    detached_mib: float
    after_mib: float

    @property
    def of_bound(self) -> float:
        return (self.detached_mib - self.before_mib) / self.bound_mib


class Bench:
    def __init__(
        self, scheduler: FakeScheduler, router: subprocess.Popen[bytes], port: int, metrics_port: int, buffer_bytes: int
    ) -> None:
        self._scheduler, self._buffer_bytes = scheduler, buffer_bytes
        self._process = psutil.Process(router.pid)
        self._target, self._metrics_port = f"127.0.0.1:{port}", metrics_port
        self._num_rounds = 0

    async def measure(self, num_streams: int, seconds: float) -> Round:
        """Measures one round. seconds: `detach_timeout`. Raises SystemExit if something is not as it should be."""
        self._num_rounds += 1
        scheduler = self._scheduler
        ids = [f"{self._num_rounds}-{number}" for number in range(num_streams)]
        async with grpc.aio.insecure_channel(self._target, options=_CHANNEL_OPTIONS) as channel:
            stub = InferenceStub(channel)
            num_read = num_unread = await self._tokens_of_half(stub)
            await self._settle()
            before = self._rss()
            scheduler.pause_at = num_read
            for begin in range(0, num_streams, _AT_ONCE):
                await asyncio.gather(
                    *(_read(stub.Generate(_asked(each, seconds)), num_read) for each in ids[begin : begin + _AT_ONCE])
                )
            await self._until(lambda gauge: gauge == num_streams, f"{num_streams} streams without a reader")
            await _read(stub.Generate(_asked(f"{self._num_rounds}-one-too-many", seconds)), num_read)
            await scheduler.wait_until(lambda fake: fake.num_live == num_streams)
            scheduler.pause_at = num_read + num_unread
            async with scheduler.changed:
                scheduler.changed.notify_all()
            await self._settle()
            detached = self._rss()
            held = await _read(stub.Attach(pb.AttachRequest(request_id=ids[-1])), num_read + num_unread)
            await self._until(lambda gauge: gauge == 0, "their end", patience_s=seconds + _PATIENCE_S)
            await scheduler.wait_until(lambda fake: fake.num_live == 0)
            await _expect_unknown(stub, ids[0])
        await asyncio.sleep(_GIVES_BACK_S)
        return Round(
            streams=num_streams,
            tokens_read=num_read,
            tokens_unread=num_unread,
            bound_mib=num_streams * self._buffer_bytes / 2**20,
            held_mib=num_streams * held / 2**20,
            before_mib=before,
            detached_mib=detached,
            after_mib=self._rss(),
        )

    async def _tokens_of_half(self, stub: InferenceStub) -> int:
        """Returns how many tokens nearly fill a half of the buffer."""
        self._scheduler.pause_at = _TRIED
        request = _asked(f"{self._num_rounds}-first", 0)
        num_bytes = await _read(stub.Generate(request), _TRIED)
        await self._scheduler.wait_until(lambda fake: fake.num_live == 0)
        tokens = _FILL * self._buffer_bytes / 2 / (num_bytes / _TRIED)
        return int(tokens) // _TOKENS_A_STEP * _TOKENS_A_STEP

    def _rss(self) -> float:
        return self._process.memory_info().rss / 2**20

    async def _settle(self) -> None:
        """Waits until neither the scheduler nor the router does anything more."""
        while True:
            cpu, steps = self._process.cpu_times(), self._scheduler.last_step
            await asyncio.sleep(1)
            now = self._process.cpu_times()
            if now.user + now.system - cpu.user - cpu.system < 0.1 and self._scheduler.last_step == steps:
                return

    async def _until(self, holds: Callable[[float], bool], what: str, *, patience_s: float = _PATIENCE_S) -> None:
        """Waits until the number of streams without a reader is as it should be. Raises SystemExit."""
        give_up = time.monotonic() + patience_s
        while not holds(gauge := await asyncio.to_thread(self._gauge)):
            if time.monotonic() > give_up:
                raise SystemExit(f"{what} did not come: {_GAUGE} is {gauge:g}")
            await asyncio.sleep(0.2)

    def _gauge(self) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=10) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return next(sample.value for family in families for sample in family.samples if sample.name == _GAUGE)


def _asked(request_id: str, seconds: float) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=8000, ignore_eos=True, temperature=0.0, logprobs=_LOGPROBS)
    token_ids = pb.TokenIds(ids=range(1000, 1016))
    return pb.GenerateRequest(request_id=request_id, token_ids=token_ids, sampling=sampling, detach_timeout=seconds)


async def _read(call: Any, num_tokens: int) -> int:
    """Reads until so many tokens have come, and breaks the call. Returns the bytes of the messages."""
    num_bytes = 0
    while num_tokens > 0:
        message = await call.read()
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise SystemExit(f"a stream ended with {await call.code()}, {num_tokens} tokens before it should")
        num_bytes += message.ByteSize()
        num_tokens -= len(message.chunk.token_ids)
    call.cancel()
    return num_bytes


async def _expect_unknown(stub: Any, request_id: str) -> None:
    code = await stub.Attach(pb.AttachRequest(request_id=request_id)).code()
    if code is not grpc.StatusCode.NOT_FOUND:
        raise SystemExit(f"attaching to {request_id} after its time ended with {code}, not NOT_FOUND")


@contextlib.asynccontextmanager
async def _bench(num_streams: int, buffer_bytes: int) -> AsyncIterator[Bench]:
    with tempfile.TemporaryDirectory() as directory:
        scheduler = FakeScheduler(
            f"unix:{directory}/scheduler.sock",
            model=model_info(max_model_len=10_000),
            tokens_per_step=_TOKENS_A_STEP,
            likely=lambda _: [(1000 + rank, -1.5 - rank) for rank in range(_LOGPROBS)],
        )
        await scheduler.start()
        port, metrics_port = free_ports(1), free_ports(1)
        command = [
            *(sys.executable, "-m", "router", f"--port={port}", "--http-port=0", f"--metrics-port={metrics_port}"),
            *(f"--scheduler-addresses={scheduler.address}", f"--served-model-name={scheduler.model.name}"),
            *(f"--runtime-dir={directory}/run", f"--stream-buffer-bytes={buffer_bytes}"),
            *(f"--max-detached-streams={num_streams}", "--log-level=warning", "--drain-timeout=0"),
        ]
        router = subprocess.Popen(command, cwd=ROOT)  # noqa: ASYNC220 (nothing runs yet that it could hold up)
        try:
            await asyncio.wait_for(wait_until_serving(f"127.0.0.1:{port}"), _READY_S)
            yield Bench(scheduler, router, port, metrics_port, buffer_bytes)
        finally:
            await asyncio.to_thread(end, router)
            await scheduler.kill()


async def _run(arguments: argparse.Namespace) -> None:
    async with _bench(arguments.streams, arguments.buffer_bytes) as bench:
        for _ in range(arguments.rounds):
            measured = await bench.measure(arguments.streams, arguments.seconds)
            show(rounded({**asdict(measured), "of_bound": measured.of_bound}, 2), as_json=arguments.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--buffer-bytes", type=int, default=2**16, help="stream_buffer_bytes; default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="detach_timeout, in which all must be read; default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="a line for each round")
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
