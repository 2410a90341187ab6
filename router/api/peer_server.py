"""Answers the other processes of routers over the same schedulers, on a server of its own: one that drains answers to
its end.
"""

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio

from protos import admin_pb2
from protos import inference_pb2 as pb
from protos import peers_pb2 as wire
from protos.peers_pb2_grpc import PeersServicer, add_PeersServicer_to_server
from router.api.gateway.answers import HeldEvents
from router.api.grpc_errors import grpc_errors, guarded
from router.intake.attach.attachments import Attachments
from router.streams.outbox import bounded_reading, bounded_write
from runtime.grpc_setup.server import ANSWERS_PINGS
from runtime.process import private_directory
from runtime.security.tls import add_port, is_unix

log = logging.getLogger("octavo.router.peers")

_LAST_WORDS_S = 1.0
_PREFIX, _SUFFIX = "router-", ".sock"


class PeersService(PeersServicer):
    """Ids in requests are those of Request.scoped_id."""

    def __init__(self, attachments: Attachments) -> None:
        self._live, self._attachments = attachments.intake.live, attachments
        self._events = HeldEvents(attachments)

    async def Find(self, request: wire.FindRequest, context: grpc.aio.ServicerContext) -> wire.FindResponse:
        held = self._attachments.held.find(request.request_id)
        waiting = self._live.waiting_here(request.request_id)
        attempt = self._live.attempt_here(request.request_id)
        return wire.FindResponse(
            is_live=attempt is not None,
            attempt=attempt or 0,
            held_over="" if held is None else held.protocol,
            waiting=waiting,
        )

    async def Cancel(self, request: pb.CancelRequest, context: grpc.aio.ServicerContext) -> pb.CancelResponse:
        return self._live.cancel_here(request.request_id)

    @guarded
    async def Migrate(
        self, request: admin_pb2.MigrateRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.MigrateResponse:
        return self._live.migrate_here(request.request_id, request.replica)

    async def Attach(self, request: pb.AttachRequest, context: grpc.aio.ServicerContext) -> None:
        async with grpc_errors(context), self._attachments.attach_here(request.request_id, request) as reader:
            with bounded_reading(reader):
                while events := await reader.take():
                    for event in events:
                        await context.write(event)

    async def ReadEvents(self, request: wire.ReadEventsRequest, context: grpc.aio.ServicerContext) -> None:
        async with grpc_errors(context):
            reading = self._events.read_here(request.request_id, request.position)
            if reading is None:
                return
            async with contextlib.aclosing(reading):
                await context.write(wire.StreamEvent())
                async for piece in reading.pieces():
                    with bounded_write():
                        await context.write(wire.StreamEvent(**piece))

    async def Drop(self, request: pb.CancelRequest, context: grpc.aio.ServicerContext) -> pb.CancelResponse:
        return pb.CancelResponse(cancelled=self._attachments.held.drop(request.request_id))


class PeerServer:
    def __init__(
        self,
        attachments: Attachments,
        directory: Path,
        host: str,
        credentials: Callable[[], grpc.ServerCredentials] | None,
    ) -> None:
        """directory: for a socket, option runtime_dir. host: option peer_host; empty: the socket."""
        self._attachments, self._directory, self._host = attachments, directory, host
        self._credentials = credentials
        # Empty: it does not listen.
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listens, if it can: without a place to listen the router serves, but others do not find its streams."""
        server = grpc.aio.server(
            options=[("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1), ANSWERS_PINGS]
        )
        add_PeersServicer_to_server(PeersService(self._attachments), server)
        try:
            self.address = self._listen(server)
        except (OSError, RuntimeError) as error:
            where = f"peer_host={self._host!r}" if self._host else f"runtime_dir={str(self._directory)!r}"
            log.warning("%s: other routers do not find the streams of this one (%s)", where, error)
            return
        await server.start()
        self._server = server
        log.debug("answers other routers at %s", self.address)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(_LAST_WORDS_S)
        if is_unix(self.address):
            await asyncio.to_thread(Path(self.address.removeprefix("unix:")).unlink, missing_ok=True)

    def _listen(self, server: grpc.aio.Server) -> str:
        if self._host:
            host = f"[{self._host}]" if ":" in self._host else self._host
            port = add_port(server, f"{host}:0", None if self._credentials is None else self._credentials())
            return f"{host}:{port}"
        directory = private_directory(self._directory)
        _remove_stale(directory)
        path = directory / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        server.add_insecure_port(f"unix:{path}")
        path.chmod(0o600)
        return f"unix:{path}"


def _remove_stale(directory: Path) -> None:
    """Removes the sockets of processes that were killed."""
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)
