"""Answers of several other routers about one request: which of them counts."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from protos import admin_pb2, peers_pb2
from protos import inference_pb2 as pb
from protos.peers_pb2_grpc import PeersServicer, add_PeersServicer_to_server
from protos.scheduler_pb2 import Load, RoutersRequest, RoutersResponse, SchedulerMessage, Welcome
from protos.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from router.errors import NotMigrated
from router.replicas.peers import Peers
from router.replicas.session import Session
from router.streams.registry import StreamRegistry
from router.telemetry.metrics import RouterMetrics
from tests.fakes.routers import socket_address
from tests.support.replicas import replica_at


class FakePeer(PeersServicer):
    """Has one attempt of any request. moves_to: where Migrate takes it; empty: it refuses."""

    def __init__(self, attempt: int, *, moves_to: str = "", is_complete: bool = False) -> None:
        self.attempt, self.moves_to, self.is_complete = attempt, moves_to, is_complete
        self.num_asked_to_move = 0

    async def Find(self, request: peers_pb2.FindRequest, context: Any) -> peers_pb2.FindResponse:
        return peers_pb2.FindResponse(is_live=not self.is_complete, attempt=self.attempt)

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        return pb.CancelResponse(cancelled=not self.is_complete, attempt=self.attempt)

    async def Migrate(self, request: admin_pb2.MigrateRequest, context: Any) -> admin_pb2.MigrateResponse:
        self.num_asked_to_move += 1
        if not self.moves_to:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"attempt {self.attempt} stays")
        return admin_pb2.MigrateResponse(moved_from="x", moved_to=self.moves_to, num_output_tokens=self.attempt)


class NamingScheduler(SchedulerServicer):
    """A scheduler that names routers."""

    def __init__(self, named: list[str], num_without_address: int) -> None:
        self.named, self.num_without_address = named, num_without_address

    async def Routers(self, request: RoutersRequest, context: Any) -> RoutersResponse:
        return RoutersResponse(peer_addresses=self.named, num_without_address=self.num_without_address)


@contextlib.asynccontextmanager
async def _peers(
    directory: Path, *fakes: FakePeer, silent: int = 0, num_without_address: int = 0
) -> AsyncIterator[Peers]:
    """silent: routers that are named, and cannot be reached."""
    servers = [grpc.aio.server() for _ in range(len(fakes) + 1)]
    addresses = [socket_address(directory, f"peer-{i}") for i in range(len(fakes) + silent)]
    for server, fake, address in zip(servers, fakes, addresses, strict=False):
        add_PeersServicer_to_server(fake, server)
        server.add_insecure_port(address)
    add_SchedulerServicer_to_server(NamingScheduler(addresses, num_without_address), servers[-1])
    servers[-1].add_insecure_port(at := socket_address(directory, "scheduler"))
    for server in servers:
        await server.start()
    channel = grpc.aio.insecure_channel(at)
    peers = Peers([replica_at(at, channel)], lambda: "unix:own")
    try:
        yield peers
    finally:
        await peers.stop()
        await channel.close()
        for server in servers:
            await server.stop(None)


async def test_the_newest_attempt_is_moved_whatever_the_others_would_say(tmp_path: Path) -> None:
    fakes = [FakePeer(1), FakePeer(7, moves_to="there"), FakePeer(3, moves_to="elsewhere")]
    async with _peers(tmp_path, *fakes) as peers:
        moved = await peers.migrate("a", "")
        assert moved is not None
        assert (moved.moved_to, moved.num_output_tokens) == ("there", 7)
        assert [fake.num_asked_to_move for fake in fakes] == [0, 1, 0]


async def test_a_refusal_of_the_newest_attempt_stands(tmp_path: Path) -> None:
    async with _peers(tmp_path, FakePeer(7), FakePeer(3, moves_to="elsewhere")) as peers:
        with pytest.raises(NotMigrated, match="attempt 7 stays"):
            await peers.migrate("a", "")
        assert await peers.migrate("a", "", newer_than=7) is None


async def test_a_success_comes_before_a_refusal_of_the_same_attempt(tmp_path: Path) -> None:
    """Before, the answer that came first counted."""
    async with _peers(tmp_path, FakePeer(0), FakePeer(0, moves_to="there"), FakePeer(0)) as peers:
        moved = await peers.migrate("a", "")
        assert moved is not None
        assert moved.moved_to == "there"


async def test_a_cancel_is_about_the_newest_attempt_and_says_if_all_were_asked(tmp_path: Path) -> None:
    async with _peers(tmp_path, FakePeer(1), FakePeer(2)) as peers:
        assert await peers.cancel("a") == (pb.CancelResponse(cancelled=True, attempt=2), True)
    async with _peers(tmp_path, FakePeer(1), FakePeer(2, is_complete=True)) as peers:
        assert await peers.cancel("a") == (pb.CancelResponse(cancelled=False, attempt=2), True), "it was complete"
    async with _peers(tmp_path, FakePeer(1), silent=1) as peers:
        assert await peers.cancel("a") == (pb.CancelResponse(cancelled=True, attempt=1), False)
    async with _peers(tmp_path, FakePeer(1), num_without_address=1) as peers:
        assert await peers.cancel("a") == (pb.CancelResponse(cancelled=True, attempt=1), False)


@pytest.mark.parametrize(("told", "are_none"), [((1, 1), True), ((1, 2), False), ((1, 0), False)])
async def test_a_router_is_alone_only_if_every_replica_says_so(told: tuple[int, ...], are_none: bool) -> None:
    replicas = [replica_at(f"unix:{number}") for number in range(len(told))]
    for replica, count in zip(replicas, told, strict=True):
        replica.session = Session(Welcome())
        replica.session.receive(SchedulerMessage(load=Load(num_routers=count)))
    assert Peers(replicas).are_none is are_none


def test_a_complete_attempt_that_its_client_still_reads_is_known_to_a_cancel() -> None:
    """Its end is no cancel, and one of an older attempt elsewhere does not count as one."""
    registry = StreamRegistry(RouterMetrics())
    stream: Any = type("Complete", (), {"done": True, "complete": True})()
    stream.request = type("Asked", (), {"scoped_id": "a", "attempt": 4})()
    registry.add(stream)
    assert registry.cancel("a") == pb.CancelResponse(cancelled=False, attempt=4)
    assert registry.cancel("b") == pb.CancelResponse()
