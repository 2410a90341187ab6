"""The coordination wire over tcp: only peers with the keys of a worker get in."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from configs.options import Options
from protos import inference_pb2
from runtime.awake_time import AwakeTime
from runtime.security.curve import make_keys, start_authenticator
from scheduler.lockstep.coordinator import Coordinator
from scheduler.lockstep.member import Member
from scheduler.ranks.epochs import Epochs, Event
from scheduler.sockets import InvalidMessages
from tests.support.ports import free_ports
from tests.support.scheduler.scheduling import TIMEOUT


class Ranks:
    """Ranks of one replica, all present: the part of scheduler.ranks.workers.Workers that a member uses."""

    def __init__(self) -> None:
        self.epochs, self.store_address = Epochs(), "10.0.0.1:5"
        self.model: inference_pb2.ModelInfo | None = None
        self.rendezvous = ""

    epoch = property(lambda self: self.epochs.number)
    is_ready = property(lambda self: self.epochs.is_ready)

    def is_complete(self, now: float) -> bool:
        return self.epochs.may_begin(now)

    def describe(self) -> str:
        return "idle"

    def begin_epoch(self, epoch: int, rendezvous: str, now: float) -> list[Event]:
        self.epochs.begin(epoch)
        self.rendezvous = rendezvous
        return []

    def end_epoch(self, cause: str) -> list[Event]:
        self.epochs.end(cause)
        return []


@pytest.fixture
def options(tmp_path: Path) -> Options:
    make_keys(tmp_path / "keys")
    port = free_ports(6)
    addresses = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 4}"
    return Options(
        enable_expert_parallel=True,
        data_parallel_size=2,
        runtime_dir=tmp_path,
        metrics_port=0,
        step_addresses=addresses,
        curve_dir=str(tmp_path / "keys"),
        heartbeat_timeout=20,
    )


@pytest.fixture
def context(options: Options) -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        authenticator = start_authenticator(context, Path(options.curve_dir))
        yield context
        authenticator.stop()


def _run(coordinator: Coordinator, members: list[Member], until: Callable[[], bool]) -> None:
    poller, deadline = zmq.Poller(), time.monotonic() + TIMEOUT
    for end in (coordinator, *members):
        poller.register(end.socket, zmq.POLLIN)
        poller.register(end.monitor, zmq.POLLIN)
    while not until():
        now = time.monotonic()
        assert now < deadline
        coordinator.serve(now)
        for member in members:
            member.exchange(now)
        poller.poll(50)


def test_members_meet_over_tcp_and_strangers_do_not_get_in(options: Options, context: zmq.Context) -> None:
    curve_dir, num_invalid = Path(options.curve_dir), 0

    def count() -> None:
        nonlocal num_invalid
        num_invalid += 1

    invalid = InvalidMessages(count)
    coordinator = Coordinator(context, options, curve_dir, invalid, AwakeTime(1.0))
    ranks = Ranks(), Ranks()
    members = [
        Member(context, options, i, curve_dir, each, invalid, AwakeTime(1.0))  # type: ignore[arg-type]
        for i, each in enumerate(ranks)
    ]
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(coordinator.socket.getsockopt_string(zmq.LAST_ENDPOINT))
    stranger.send(b"\xff\xff")
    try:
        _run(coordinator, members, lambda: all(each.epochs.is_open for each in ranks))
        assert ranks[0].epoch == ranks[1].epoch
        # The first rank of replica 0 holds the store.
        assert {each.rendezvous for each in ranks} == {f"tcp:10.0.0.1:5/{ranks[0].epoch}"}
        assert not num_invalid
        # Invalid bytes are counted if their sender has the keys.
        members[1].socket.send(b"\xff\xff")
        _run(coordinator, members, lambda: num_invalid > 0)
        assert ranks[0].epochs.is_open
        members[1].close()
        _run(coordinator, members[:1], lambda: not ranks[0].epochs.is_open)
        assert ranks[0].epochs.cause == "the scheduler of replica 1 has disconnected"
    finally:
        for end in (stranger, members[0], coordinator):
            end.close()
