"""Bytes for live servers, below the messages: HTTP, HTTP/2, gRPC's frames, ZeroMQ's greeting, CURVE."""

import asyncio
import secrets
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import grpc.aio
import zmq
from prometheus_client import CollectorRegistry

from benchmarks.fuzz.edge import Edge
from benchmarks.fuzz.edges.cluster import REQUESTS, small_cluster
from benchmarks.fuzz.edges.raw import RawMessages, RawSocket
from benchmarks.fuzz.mutation import change_bytes
from protos import admin_pb2, inference_pb2
from protos import scheduler_pb2 as session
from router.api.gateway.app import Gateway
from router.api.gateway.server import GatewayServer
from runtime.security.curve import client_curve, make_keys, server_curve, start_authenticator
from runtime.telemetry.http_server import ObservabilityServer
from runtime.wire import PROTOCOL_VERSION
from tests.support.scheduler.scheduling import make_options, running_scheduler, running_worker

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
_POST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 47\r\n\r\n"
    b'{"prompt": "Hello there", "max_tokens": 1, "n":1}'
)
_CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    b'5\r\n{"a":\r\nffffffff\r\n1}\r\n0\r\n\r\n'
)
_HTTP = (_GET, _POST, _CHUNKED, _GET + _GET, b"GET /" + b"a" * 100_000, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000)


def _http2_frames(random: Random) -> bytes:
    """A settings frame, then frames that make little sense."""
    frames = [_PREFACE, struct.pack(">I", 0)[1:] + b"\x04\x00" + bytes(4)]
    for _ in range(random.randrange(1, 6)):
        payload = random.randbytes(random.choice((0, 4, 8, 50)))
        length = len(payload) if random.random() < 0.8 else random.randrange(2**24)
        kind, flags = random.randrange(12), random.randrange(256)
        frames.append(
            struct.pack(">I", length)[1:] + bytes((kind, flags)) + struct.pack(">I", random.randrange(8)) + payload
        )
    return b"".join(frames)


def _of_http(random: Random) -> bytes:
    return change_bytes(random.choice(_HTTP), random)


def _of_zmtp(random: Random) -> bytes:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + random.choice((b"NULL", b"CURVE", b"PLAIN")).ljust(20, b"\0")
    greeting += bytes(32)
    hello = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + random.randbytes(120)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    return change_bytes(greeting + random.choice((hello, ready, b"\x02" + b"\xff" * 8)), random)


@asynccontextmanager
async def router_grpc(directory: Path) -> AsyncIterator[Edge]:
    async with small_cluster(directory) as cluster:
        yield RawSocket(cluster.router.port, _http2_frames, cluster.check)


@asynccontextmanager
async def http_port(directory: Path) -> AsyncIterator[tuple[int, Callable[[], Awaitable[None]]]]:
    """Yields a router's HTTP port, and a check that good requests are still answered there."""
    async with small_cluster(directory) as cluster:
        router = cluster.router
        gateway = Gateway(router.intake, router.metrics.registry, router.readiness, max_body_bytes=2**20)
        server = GatewayServer(gateway, "127.0.0.1", 0)
        server.start()

        async def check() -> None:
            await _expect_http(server.port, b"HTTP/1.1 200")
            await cluster.check()

        try:
            yield server.port, check
        finally:
            await server.stop()


@asynccontextmanager
async def router_http(directory: Path) -> AsyncIterator[Edge]:
    async with http_port(directory) as (port, check):
        yield RawSocket(port, _of_http, check)


@asynccontextmanager
async def metrics(directory: Path) -> AsyncIterator[Edge]:
    server = ObservabilityServer("127.0.0.1", 0, CollectorRegistry(), lambda: (True, "well"))
    server.start()

    async def check() -> None:
        await _expect_http(server.port, b"HTTP/1.0 200")

    try:
        yield RawSocket(server.port, _of_http, check)
    finally:
        await asyncio.to_thread(server.stop)


async def _expect_http(port: int, beginning: bytes) -> None:
    async with asyncio.timeout(15):
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                # The server is still starting.
                await asyncio.sleep(0.01)
            else:
                break
        writer.write(_GET)
        answer = await reader.read(4096)
    assert answer.startswith(beginning), f"a good request gets {answer[:60]!r}"
    writer.close()


@asynccontextmanager
async def router_methods(directory: Path) -> AsyncIterator[Edge]:
    methods = (
        ("/octavo.v1.Inference/Generate", REQUESTS),
        ("/octavo.v1.Inference/Tokenize", (inference_pb2.TokenizeRequest(prompt="a"),)),
        ("/octavo.v1.Inference/Cancel", (inference_pb2.CancelRequest(request_id="a"),)),
        ("/octavo.v1.Admin/Explain", (admin_pb2.ExplainRequest(request_id="a"),)),
        ("/octavo.v1.Admin/ResetPrefixCache", (admin_pb2.ResetPrefixCacheRequest(),)),
        ("/grpc.health.v1.Health/Check", (inference_pb2.CancelRequest(request_id="octavo.v1.Inference"),)),
        ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", (inference_pb2.CancelRequest(request_id="a"),)),
        ("/octavo.v1.Inference/Nothing", (inference_pb2.CancelRequest(request_id="a"),)),
    )
    async with (
        small_cluster(directory, max_message_bytes=2**20) as cluster,
        grpc.aio.insecure_channel(
            f"127.0.0.1:{cluster.router.port}", options=[("grpc.max_send_message_length", -1)]
        ) as channel,
    ):
        yield RawMessages(channel, methods, cluster.check)


@asynccontextmanager
async def scheduler_methods(directory: Path) -> AsyncIterator[Edge]:
    options = make_options(directory)
    opening = session.RouterMessage(open=session.Open(protocol_version=PROTOCOL_VERSION, router_id="fuzz"))
    submit = session.Submit(
        request_id="a",
        group=1,
        num_prompt_tokens=2,
        prompt_token_ids=[20, 21],
        sampling=inference_pb2.SamplingParams(max_tokens=2),
        choices=[session.SequenceStart()],
    )
    use = session.KeyUse(key="a", requests_per_minute=6, num_requests=1, requests_left=5)
    methods = (
        ("/octavo.v1.Scheduler/Session", (opening, opening, session.RouterMessage(submit=submit))),
        ("/octavo.v1.Admin/Explain", (admin_pb2.ExplainRequest(request_id="a"),)),
        ("/octavo.v1.Admin/ResetPrefixCache", (admin_pb2.ResetPrefixCacheRequest(),)),
        ("/octavo.v1.Scheduler/Pause", (session.PauseRequest(mode=session.PAUSE_MODE_WAIT, clear_cache=True),)),
        ("/octavo.v1.Scheduler/Count", (session.CountRequest(keys=[use]),)),
        ("/octavo.v1.Scheduler/Nothing", (opening,)),
    )
    async with (
        running_scheduler(options) as server,
        running_worker(options),
        grpc.aio.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)]) as channel,
    ):

        async def check() -> None:
            call = channel.stream_stream("/octavo.v1.Scheduler/Session")(timeout=10, wait_for_ready=True)
            await call.write(opening.SerializeToString())
            answer: Any = await call.read()
            message = session.SchedulerMessage.FromString(answer)
            assert message.HasField("welcome"), "a good Session gets no Welcome"
            call.cancel()

        yield RawMessages(channel, methods, check)


@asynccontextmanager
async def curve(directory: Path) -> AsyncIterator[Edge]:
    """A ROUTER socket with CURVE over tcp, like the one that a scheduler has for its workers."""
    keys = directory / "keys"
    make_keys(keys)
    with zmq.Context() as context:
        authenticator = start_authenticator(context, keys)
        bound: zmq.Socket = context.socket(zmq.ROUTER)
        bound.setsockopt(zmq.LINGER, 0)
        server_curve(bound, keys)
        port = bound.bind_to_random_port("tcp://127.0.0.1")

        async def check() -> None:
            assert not bound.poll(0), "a message got past CURVE"
            await asyncio.to_thread(_greet_with_keys, context, keys, port)
            assert bound.poll(5000), "a worker with good keys does not get in"
            bound.recv_multipart()

        try:
            yield RawSocket(port, _of_zmtp, check)
        finally:
            bound.close(linger=0)
            authenticator.stop()


def _greet_with_keys(context: zmq.Context, keys: Path, port: int) -> None:
    with context.socket(zmq.DEALER) as worker:
        worker.setsockopt(zmq.LINGER, 2000)
        client_curve(worker, keys)
        worker.connect(f"tcp://127.0.0.1:{port}")
        worker.send(secrets.token_bytes(8))
