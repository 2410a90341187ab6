"""The coordination wire: what schedulers of replicas in lockstep tell their coordinator, and what it tells them."""

import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random

import zmq

from benchmarks.fuzz.edge import Edge
from benchmarks.fuzz.mutation import malformed
from configs.options import Options
from protos import coordination_pb2 as pb
from runtime.awake_time import AwakeTime
from runtime.wire import PROTOCOL_VERSION, coordination_endpoint, octavo_version, replica_identity
from scheduler.lockstep.agreement import common_options
from scheduler.lockstep.coordinator import Coordinator
from scheduler.lockstep.member import Member
from scheduler.ranks.heartbeats import Heartbeats
from scheduler.ranks.membership import Terms
from scheduler.ranks.workers import Workers
from scheduler.sockets import InvalidMessages

_INSTANCE = 77


class Coordination:
    """A coordinator with two peers, and a member whose coordinator is a fake."""

    def __init__(self, directory: Path, context: zmq.Context, heartbeats: Heartbeats, invalid: InvalidMessages) -> None:
        self._options = self._options_at(directory / "real")
        self._context = context
        self._coordinator = Coordinator(context, self._options, None, invalid, AwakeTime(1.0))
        self._peers = [self._connect(replica_identity(1, _INSTANCE)), self._connect(secrets.token_bytes(5))]
        theirs = self._options_at(directory / "made")
        self._fake = context.socket(zmq.ROUTER)
        self._fake.setsockopt(zmq.LINGER, 0)
        self._fake.bind(coordination_endpoint(theirs.step_address(0)))
        workers = Workers(
            context,
            f"ipc://{directory}/workers",
            None,
            Terms.of(theirs),
            heartbeats,
            invalid,
            AwakeTime(1.0),
            rendezvous=None,
            in_lockstep=True,
            heartbeat_timeout=10.0,
            step_timeout=60.0,
        )
        self._workers = workers
        self._member = Member(context, theirs, 1, None, workers, invalid, AwakeTime(1.0))
        self._member_identity = b""

    @staticmethod
    def _options_at(directory: Path) -> Options:
        directory.mkdir()
        return Options(
            runtime_dir=directory,
            data_parallel_size=2,
            enable_expert_parallel=True,
            served_model_name="hashes",
            heartbeat_timeout=60.0,
        )

    def _connect(self, identity: bytes) -> zmq.Socket:
        peer: zmq.Socket = self._context.socket(zmq.DEALER)
        peer.setsockopt(zmq.IDENTITY, b"p" + identity if identity[0] == 0 else identity)
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(coordination_endpoint(self._options.step_address(0)))
        return peer

    def _state(self, **fields: object) -> pb.ReplicaState:
        state = pb.ReplicaState(
            protocol_version=PROTOCOL_VERSION,
            octavo_version=octavo_version(),
            replica=1,
            instance=_INSTANCE,
            options=common_options(self._options),
            condition=pb.REPLICA_CONDITION_COMPLETE,
            epoch=1,
        )
        state.MergeFrom(pb.ReplicaState(**fields))  # type: ignore[arg-type]
        return state

    def malformed(self, random: Random) -> bytes:
        which = random.randrange(3)
        if which == 2:
            epoch = random.randrange(5)
            seeds = (
                pb.GroupState(epoch=epoch, instance=3, is_open=True, rendezvous="file:/nowhere", wave_step=2),
                pb.GroupState(epoch=epoch, instance=3, cause="why", waiting_for="replica 0"),
            )
            return bytes([2]) + malformed(seeds, random)
        ready = self._state(condition=pb.REPLICA_CONDITION_READY, wanted_step=3, step=2, fingerprint="f")
        return bytes([which]) + malformed((self._state(), ready, self._state(cause="why", epoch=9)), random)

    async def feed(self, message: bytes) -> str:
        now, which = time.monotonic(), message[0] % 3
        if which == 2:
            return self._tell_member(message[1:], now)
        peer = self._peers[which]
        peer.send(message[1:])
        self._coordinator.socket.poll(2)
        self._coordinator.serve(now)
        with suppress(zmq.Again):
            while True:
                pb.GroupState.FromString(peer.recv(zmq.NOBLOCK))
        return "heard"

    def _tell_member(self, message: bytes, now: float) -> str:
        self._member.exchange(now)
        with suppress(zmq.Again):
            while True:
                self._member_identity = self._fake.recv_multipart(zmq.NOBLOCK)[0]
        if not self._member_identity:
            return "member is not there yet"
        self._fake.send_multipart([self._member_identity, message], zmq.NOBLOCK)
        self._member.socket.poll(2)
        events = self._member.exchange(now)
        return f"member: {type(events[0]).__name__ if events else 'nothing'}"

    async def check(self) -> None:
        peer = self._peers[0]
        peer.send(self._state().SerializeToString())
        gives_up_at, became = time.monotonic() + 10.0, "not answered"
        # Refusals of earlier messages may come first; the coordinator repeats its state each second.
        while time.monotonic() < gives_up_at:
            self._coordinator.serve(time.monotonic())
            if peer.poll(100):
                answer = pb.GroupState.FromString(peer.recv())
                if not answer.refusal:
                    return
                became = f"refused: {answer.refusal}"
        raise AssertionError(f"a good ReplicaState is {became}")

    def close(self) -> None:
        for socket in (*self._peers, self._fake):
            socket.close(linger=0)
        self._member.close()
        self._coordinator.close()
        self._workers.close("")


@asynccontextmanager
async def coordination(directory: Path) -> AsyncIterator[Edge]:
    logging.getLogger("octavo").setLevel(logging.CRITICAL)
    with zmq.Context() as context:
        invalid = InvalidMessages(lambda: None)
        heartbeats = Heartbeats(context, f"ipc://{directory}/beats", None, instance=1, invalid=invalid, timeout=10)
        heartbeats.start_bound()
        edge = Coordination(directory, context, heartbeats, invalid)
        try:
            yield edge
        finally:
            edge.close()
            heartbeats.stop()
