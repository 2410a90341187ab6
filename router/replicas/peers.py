"""The other processes of routers over the same schedulers: asks them about streams that are not here.

Schedulers know who is there: each process says in its Sessions where it answers. So a process that drains or has no
replica for its streams is found, too, as long as it has a Session with any scheduler that both share.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from protos import admin_pb2, peers_pb2
from protos import inference_pb2 as pb
from protos.peers_pb2_grpc import PeersStub
from protos.scheduler_pb2 import RoutersRequest, RoutersResponse
from protos.scheduler_pb2_grpc import SchedulerStub
from router.errors import InvalidRequest, NoReplica, NotKept, NotMigrated, RequestError, UnknownRequest
from router.replicas.broadcast import ANSWER_TIMEOUT_S, broadcast, newest
from router.replicas.replica import Replica
from runtime.security.tls import open_channel

Answer = TypeVar("Answer")
# The address of a process, and what it knows of a request.
Found = tuple[str, peers_pb2.FindResponse]

_CHANNEL_OPTIONS = [
    # Events are as large as those of clients.
    ("grpc.max_receive_message_length", -1),
    # Finds a host that has vanished while a client waits.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
]
# Statuses that say something about the request, and not about the peer. NOT_FOUND says that it is not there.
_OF_REQUEST: dict[grpc.StatusCode, type[RequestError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: NotMigrated,
}


class Peers:
    def __init__(
        self,
        replicas: Sequence[Replica],
        own_address: Callable[[], str] = str,
        credentials: Callable[[], grpc.ChannelCredentials] | None = None,
    ) -> None:
        """own_address: where this process answers others. credentials: returns those in force; None: no TLS."""
        self._replicas, self._own_address, self._credentials = replicas, own_address, credentials
        # By address: those that were there when they were asked for last.
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    @property
    def are_none(self) -> bool:
        """True if every replica says that no other router is there: then nobody need be asked."""
        return all(replica.num_routers == 1 for replica in self._replicas)

    async def find(self, scoped_id: str) -> Found | None:
        """Returns the address of a process that knows a request, and what it knows; None if none does. One that holds
        a stream comes before others, and a newer attempt before an older one."""
        found = await self._find_all(scoped_id)
        return max(found, key=lambda each: (bool(each[1].held_over), each[1].attempt), default=None)

    async def find_live(self, scoped_id: str, *, newer_than: int | None = None) -> list[Found]:
        """Returns the processes that have a live attempt, the newest first. newer_than: only attempts above it."""
        found = [each for each in await self._find_all(scoped_id) if each[1].is_live]
        found.sort(key=lambda each: each[1].attempt, reverse=True)
        return [each for each in found if newer_than is None or each[1].attempt > newer_than]

    async def _find_all(self, scoped_id: str) -> list[Found]:
        async def ask(address: str) -> Found | None:
            request = peers_pb2.FindRequest(request_id=scoped_id)
            found = await self._stub(address).Find(request, timeout=ANSWER_TIMEOUT_S)
            return (address, found) if found.is_live or found.held_over else None

        return (await self._ask_all(ask))[0]

    async def cancel(self, scoped_id: str) -> tuple[pb.CancelResponse, bool]:
        """Ends all attempts of a request that other processes have. Returns the newest, and True if every other process
        has been asked."""

        async def ask(address: str) -> pb.CancelResponse:
            return await self._stub(address).Cancel(pb.CancelRequest(request_id=scoped_id), timeout=ANSWER_TIMEOUT_S)

        answers, is_all = await self._ask_all(ask)
        return newest((pb.CancelResponse(), *answers)), is_all

    async def drop(self, scoped_id: str) -> bool:
        """Ends a held stream where it is, and has it forgotten; False if no other process has it."""

        async def ask(address: str) -> bool | None:
            answer = await self._stub(address).Drop(pb.CancelRequest(request_id=scoped_id), timeout=ANSWER_TIMEOUT_S)
            return answer.cancelled or None

        return bool((await self._ask_all(ask))[0])

    async def migrate(
        self, scoped_id: str, address: str, *, newer_than: int | None = None
    ) -> admin_pb2.MigrateResponse | None:
        """Moves the newest live attempt of a request where it is; None if no other process has one. address: the
        target, as in scheduler_addresses. newer_than: as in find_live. Raises InvalidRequest, NotMigrated."""
        asked = admin_pb2.MigrateRequest(request_id=scoped_id, replica=address)

        async def ask(peer: str) -> admin_pb2.MigrateResponse | RequestError:
            try:
                return await self._stub(peer).Migrate(asked, timeout=ANSWER_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if (kind := _OF_REQUEST.get(error.code())) is None:
                    raise
                return kind(error.details() or "")

        refusal: RequestError | None = None
        refused = -1
        for peer, found in await self.find_live(scoped_id, newer_than=newer_than):
            if found.attempt < refused:
                break
            with contextlib.suppress(grpc.aio.AioRpcError):
                outcome = await ask(peer)
                if not isinstance(outcome, RequestError):
                    return outcome
                # A process that has the same attempt may move it.
                refusal, refused = refusal or outcome, found.attempt
        if refusal is not None:
            raise refusal
        return None

    def attach(self, address: str, asked: pb.AttachRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yields a stream's events that its client lacks. address: of the process that holds it. Raises
        RequestError."""
        return _passed_on(self._stub(address).Attach(asked))

    def read_events(self, address: str, scoped_id: str, position: int) -> AsyncGenerator[peers_pb2.StreamEvent, None]:
        """Yields a stream's server-sent events behind a position (ReadEvents). Raises RequestError."""
        request = peers_pb2.ReadEventsRequest(request_id=scoped_id, position=position)
        return _passed_on(self._stub(address).ReadEvents(request))

    def _stub(self, address: str) -> Any:
        """Returns a stub, as Any: the generated types are those of the synchronous one."""
        channel = self._channels.get(address)
        if channel is None:
            credentials = None if self._credentials is None else self._credentials()
            channel = self._channels[address] = open_channel(address, credentials, _CHANNEL_OPTIONS)
        return PeersStub(channel)

    async def _addresses(self) -> tuple[list[str], bool]:
        """Asks the schedulers. If none answers, those that were there before are all that is known.

        Returns True with them if these are all other processes.
        """

        async def ask(channel: grpc.aio.Channel) -> RoutersResponse:
            stub: Any = SchedulerStub(channel)
            return await stub.Routers(RoutersRequest(), timeout=ANSWER_TIMEOUT_S)

        try:
            answers, unreachable = await broadcast(self._replicas, ask)
        except NoReplica:
            return list(self._channels), False
        own = 0 if self._own_address() else 1
        is_all = not unreachable and all(answer.num_without_address <= own for answer in answers)
        there = {address for answer in answers for address in answer.peer_addresses} - {self._own_address()}
        for gone in self._channels.keys() - there:
            # Calls that still run on it end with the process at its other end.
            channel = self._channels.pop(gone)
            self._closing.add(task := asyncio.create_task(channel.close(grace=ANSWER_TIMEOUT_S)))
            task.add_done_callback(self._closing.discard)
        return sorted(there), is_all

    async def _ask_all(self, ask: Callable[[str], Awaitable[Answer | None]]) -> tuple[list[Answer], bool]:
        """Returns the answers of those who know something, and True if every other process has answered. One that
        cannot be reached knows nothing."""
        num_silent = 0

        async def ask_one(address: str) -> Answer | None:
            nonlocal num_silent
            try:
                return await ask(address)
            except grpc.aio.AioRpcError:
                num_silent += 1
                return None

        addresses, is_all = await self._addresses()
        answers = await asyncio.gather(*map(ask_one, addresses))
        return [answer for answer in answers if answer is not None], is_all and not num_silent


async def _passed_on(call: Any) -> AsyncGenerator[Any, None]:
    try:
        async for event in call:
            yield event
    except grpc.aio.AioRpcError as error:
        raise _error_of(error) from None
    finally:
        call.cancel()


def _error_of(error: grpc.aio.AioRpcError) -> RequestError:
    """Returns the error of a stream that a peer passes on, with its status."""
    code, details = error.code(), error.details() or error.code().name
    kind = {grpc.StatusCode.NOT_FOUND: UnknownRequest, grpc.StatusCode.FAILED_PRECONDITION: NotKept}.get(code)
    passed_on = (kind or RequestError)(details)
    passed_on.status = code
    return passed_on
