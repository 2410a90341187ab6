"""router.api.open_streams: streams that need no key are counted, and their messages."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.api import open_streams
from router.api.open_streams import OpenStreams
from router.api.receiving import Receiving
from runtime.grpc_setup.server import add_reflection

_WAIT_S = 30.0
_WATCH = health_pb2.HealthCheckRequest()


@contextlib.asynccontextmanager
async def serving(most_streams: int) -> AsyncIterator[list[str]]:
    """A server with the interceptors of a router without keys, at two addresses."""
    receiving = Receiving(max_message_bytes=2**20, max_total_bytes=2**24)
    server = grpc.aio.server(interceptors=[receiving, OpenStreams(most_streams)])
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)  # type: ignore[attr-defined]
    add_reflection(server)
    with tempfile.TemporaryDirectory() as folder:
        port = server.add_insecure_port("127.0.0.1:0")
        server.add_insecure_port(f"unix:{folder}/socket")
        await server.start()
        try:
            yield [f"127.0.0.1:{port}", f"unix:{folder}/socket"]
        finally:
            await server.stop(0)


def _stub(kind: Any, channel: grpc.aio.Channel) -> Any:
    """Returns a stub, as Any: the generated types are those of the synchronous one."""
    return kind(channel)


async def test_a_connection_has_no_more_watches_than_are_free() -> None:
    async with (
        asyncio.timeout(_WAIT_S),
        serving(4) as addresses,
        grpc.aio.insecure_channel(addresses[0]) as one,
        grpc.aio.insecure_channel(addresses[1]) as other,
    ):
        stub, others = _stub(health_pb2_grpc.HealthStub, one), _stub(health_pb2_grpc.HealthStub, other)
        watches = [stub.Watch(_WATCH) for _ in range(2)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="2 of them on this connection") as refused:
            await stub.Watch(_WATCH).read()
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        # Another connection still has room, and Check is no stream.
        assert (await others.Watch(_WATCH).read()).status
        assert (await stub.Check(_WATCH)).status
        # A watch that ends leaves its place.
        watches[0].cancel()
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if (await stub.Watch(_WATCH).read()).status:
                    break


async def test_a_reflection_stream_has_so_many_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_streams, "MOST_MESSAGES", 3)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    async with asyncio.timeout(_WAIT_S), serving(4) as addresses, grpc.aio.insecure_channel(addresses[0]) as channel:
        stub = _stub(reflection_pb2_grpc.ServerReflectionStub, channel)
        answers = [answer async for answer in stub.ServerReflectionInfo(iter([asked] * 3))]
        assert len(answers) == 3
        with pytest.raises(grpc.aio.AioRpcError, match="more than 3 messages") as refused:
            async for _ in stub.ServerReflectionInfo(iter([asked] * 4)):
                pass
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
