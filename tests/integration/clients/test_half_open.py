"""A connection is half-open and nothing is due on it: the options of our gRPC channels end it after a ping."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio
import pytest

from benchmarks.faults.means.relay import Relays
from octavo.client.connection import CHANNEL_OPTIONS
from router.replicas.connection import CHANNEL_OPTIONS as SCHEDULER_CHANNEL_OPTIONS
from runtime.grpc_setup.server import ANSWERS_PINGS
from tests.support.ports import free_ports

# The times of the options are divided by this. Then a ping and the wait for its answer take at most 4 s; they took 60
# when gRPC waited for the answer as long as it does by default.
FASTER = 10
PATIENCE_S = 20.0


async def echo(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    async for each in messages:
        yield each


@pytest.mark.parametrize("options", [CHANNEL_OPTIONS, SCHEDULER_CHANNEL_OPTIONS], ids=["client", "router"])
async def test_a_half_open_connection_ends(options: Sequence[tuple[str, int]]) -> None:
    own, relayed = free_ports(1), free_ports(1)
    server = grpc.aio.server(options=[ANSWERS_PINGS])
    method = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", {"Echo": method}),))
    server.add_insecure_port(f"127.0.0.1:{own}")
    await server.start()
    faster = [(name, value // FASTER if "keepalive" in name or "ping" in name else value) for name, value in options]
    with Relays([(relayed, own)]) as relays:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{relayed}", options=faster) as channel:
            call = channel.stream_stream("/Test/Echo")()
            await call.write(b"hello")
            assert await call.read() == b"hello"
            relays.call(lambda: relays.all[0].forget_one_side(keep_dialer=True))
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                    await call.read()
    await server.stop(None)
