"""The limit that the gRPC library sets: a server that writes the same bytes to every stream, and does nothing else.

    python -m benchmarks.router.floor PORT SCHEDULER_ADDRESS

It takes a router's place: it reads a scheduler's Session, and for each step writes one message of a router's usual size
to each Generate call. It parses, looks up, detokenizes and counts nothing.
"""

import asyncio
import sys

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from protos import inference_pb2 as pb
from protos import scheduler_pb2 as wire
from runtime.wire import PROTOCOL_VERSION, SESSION_MESSAGE_BYTES

_SERVICE = "octavo.v1.Inference"


def _piece(first_token: int, num_tokens: int) -> bytes:
    chunk = pb.Chunk(first_token=first_token, token_ids=[30_000] * num_tokens, text=" word" * num_tokens, exact=True)
    return pb.GenerateResponse(chunk=chunk).SerializeToString()


class _Floor:
    def __init__(self, session: grpc.aio.StreamStreamCall) -> None:
        self._session = session
        # A call allows one write at a time.
        self._writing = asyncio.Lock()
        self._num_calls, self._num_live = 0, 0
        self._num_steps = 0
        self._stepped: list[asyncio.Future[None]] = []
        self._pieces: dict[tuple[int, int], bytes] = {}

    async def generate(self, request: bytes, context: grpc.aio.ServicerContext) -> None:
        if not self._num_live:
            self._num_steps = 0
        self._num_live += 1
        self._num_calls += 1
        group = self._num_calls
        await self._send(wire.RouterMessage(submit=wire.Submit(group=group, num_prompt_tokens=1, prompt_token_ids=[1])))
        try:
            # Takes the place of Started.
            await context.write(_piece(0, 0))
            await self._write_steps(context)
        finally:
            self._num_live -= 1
            await self._send(wire.RouterMessage(cancel=wire.CancelSequences(group=group)))

    async def _send(self, message: wire.RouterMessage) -> None:
        async with self._writing:
            await self._session.write(message)

    async def _write_steps(self, context: grpc.aio.ServicerContext) -> None:
        """Writes steps until the client leaves."""
        loop = asyncio.get_running_loop()
        num_written = 0
        while True:
            if num_written == self._num_steps:
                stepped: asyncio.Future[None] = loop.create_future()
                self._stepped.append(stepped)
                await stepped
            span = num_written, self._num_steps - num_written
            piece = self._pieces.get(span)
            if piece is None:
                piece = self._pieces[span] = _piece(*span)
            num_written = self._num_steps
            await context.write(piece)

    async def read_steps(self) -> None:
        async for message in self._session:
            outputs = message.outputs
            if not outputs.groups:
                continue
            self._num_steps = outputs.first_tokens[-1] + 1
            stepped, self._stepped = self._stepped, []
            for each in stepped:
                if not each.done():
                    each.set_result(None)


async def _main(port: str, scheduler: str) -> None:
    server = grpc.aio.server()
    async with grpc.aio.insecure_channel(
        scheduler, options=[("grpc.max_receive_message_length", SESSION_MESSAGE_BYTES)]
    ) as channel:
        session = channel.stream_stream(
            "/octavo.v1.Scheduler/Session",
            request_serializer=wire.RouterMessage.SerializeToString,
            response_deserializer=wire.SchedulerMessage.FromString,
        )(wait_for_ready=True)
        await session.write(wire.RouterMessage(open=wire.Open(protocol_version=PROTOCOL_VERSION)))
        floor = _Floor(session)
        # Without serializers, bytes are sent as they are.
        handler = grpc.unary_stream_rpc_method_handler(floor.generate)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Generate": handler}),))
        servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await servicer.set(_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await floor.read_steps()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2]))
