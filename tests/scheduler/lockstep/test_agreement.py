"""The coordinator's decisions from the replicas' states, whenever these come."""

import pytest

from configs.options import Options
from protos import coordination_pb2 as pb
from runtime.awake_time import AwakeTime
from runtime.wire import PROTOCOL_VERSION, octavo_version
from scheduler.lockstep.agreement import Agreement, common_options

EPOCH = 100
INCOMPLETE, COMPLETE, MEETING, READY = (
    pb.REPLICA_CONDITION_INCOMPLETE,
    pb.REPLICA_CONDITION_COMPLETE,
    pb.REPLICA_CONDITION_MEETING,
    pb.REPLICA_CONDITION_READY,
)


class Places:
    """The places where ranks meet; records the epochs whose place was kept."""

    def __init__(self) -> None:
        self.kept: list[int | None] = []

    def address(self, epoch: int, store_address: str) -> str:
        return f"{epoch} at {store_address}"

    def remove_all_but(self, epoch: int | None) -> None:
        self.kept.append(epoch)


class Replicas:
    """Two replicas that send the states that a test asks for."""

    def __init__(self) -> None:
        self.places = Places()
        self._options = Options().model_copy(update={"data_parallel_size": 2, "max_steps_in_flight": 2})
        self.agreement = Agreement(
            self._options, self.places, AwakeTime(1.0), instance=5, epoch=EPOCH, heartbeat_timeout=10
        )
        self.now = 0.0

    @property
    def group(self) -> pb.GroupState:
        return self.agreement.group

    def state(self, replica: int, condition: pb.ReplicaCondition, *, epoch: int, **fields: object) -> pb.ReplicaState:
        known: dict = {
            "protocol_version": PROTOCOL_VERSION,
            "octavo_version": octavo_version(),
            "replica": replica,
            "instance": replica + 1,
            "options": common_options(self._options),
            "epoch": epoch,
            "condition": condition,
            "store_address": f"host-{replica}",
            **fields,
        }
        return pb.ReplicaState(**known)

    def say(self, replica: int, condition: pb.ReplicaCondition, *, epoch: int = EPOCH, **fields: object) -> None:
        self.agreement.hear(self.state(replica, condition, epoch=epoch, **fields), self.now)

    def begin(self) -> int:
        """Makes both replicas ready in a new epoch; returns its number."""
        epoch = self.group.epoch
        for replica in (0, 1):
            self.say(replica, COMPLETE, epoch=epoch)
        assert self.group.is_open
        for replica in (0, 1):
            self.say(replica, READY, epoch=self.group.epoch)
        return self.group.epoch


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


def test_an_epoch_begins_when_all_are_complete_and_have_heard_of_the_last_one(replicas: Replicas) -> None:
    replicas.say(0, COMPLETE)
    assert replicas.group.waiting_for == "replica 1, whose scheduler is not connected"
    replicas.say(1, INCOMPLETE, description="waiting for rank 1 of 2")
    assert replicas.group.waiting_for == "replica 1 (waiting for rank 1 of 2)"
    replicas.say(1, COMPLETE, epoch=0)
    assert not replicas.group.is_open
    replicas.say(1, COMPLETE)
    assert (replicas.group.is_open, replicas.group.epoch) == (True, EPOCH + 1)
    # The first rank of the first replica gives the address where all meet.
    assert replicas.group.rendezvous == f"{EPOCH + 1} at host-0"


def test_what_was_said_of_earlier_epochs_ends_none(replicas: Replicas) -> None:
    epoch = replicas.begin()
    replicas.say(1, INCOMPLETE, epoch=epoch - 1, cause="long ago")
    replicas.say(1, COMPLETE, epoch=epoch - 1, wanted_step=7)
    assert replicas.group.is_open
    assert replicas.group.wave_step == 0
    replicas.say(1, INCOMPLETE, epoch=epoch, cause="rank 0 is gone")
    assert (replicas.group.is_open, replicas.group.cause) == (False, "replica 1: rank 0 is gone")
    # States that the other replica sent before it heard of that begin nothing.
    replicas.say(1, COMPLETE, epoch=epoch)
    replicas.say(0, READY, epoch=epoch, wanted_step=3)
    assert not replicas.group.is_open
    assert replicas.group.wave_step == 0
    replicas.say(0, COMPLETE, epoch=epoch)
    assert replicas.group.epoch == epoch + 1


def test_the_place_where_ranks_wait_is_left_alone_until_all_have_met(replicas: Replicas) -> None:
    epoch = replicas.begin()
    assert replicas.places.kept == [epoch]
    replicas.say(0, INCOMPLETE, epoch=epoch)
    for replica in (0, 1):
        replicas.say(replica, COMPLETE, epoch=epoch)
    replicas.say(0, MEETING, epoch=epoch + 1)
    replicas.agreement.close()
    assert replicas.places.kept == [epoch]


def test_a_wave_is_announced_once_however_many_ask(replicas: Replicas) -> None:
    epoch = replicas.begin()
    for replica in (1, 0):
        replicas.say(replica, READY, epoch=epoch, wanted_step=1)
    assert replicas.group.wave_step == 1
    replicas.say(0, READY, epoch=epoch, wanted_step=9)
    replicas.say(1, READY, epoch=epoch, wanted_step=1)
    assert replicas.group.wave_step == 9


def test_a_replica_that_is_silent_or_was_started_again_has_gone(replicas: Replicas) -> None:
    epoch = replicas.begin()
    replicas.say(1, READY, epoch=0, instance=77)
    assert replicas.group.cause == "the scheduler of replica 1 was restarted"
    replicas.say(1, COMPLETE, epoch=epoch, instance=77)
    replicas.say(0, COMPLETE, epoch=epoch)
    assert replicas.group.is_open
    replicas.now = 8.0
    replicas.say(0, READY, epoch=epoch + 1)
    replicas.agreement.tick(11.0)
    assert replicas.group.cause == "the scheduler of replica 1 has been silent for 11.0 s (heartbeat_timeout=10)"
    assert replicas.agreement.members == [(0, 1)]


def test_a_replica_that_plans_no_further_is_named(replicas: Replicas) -> None:
    epoch = replicas.begin()
    for now in (1.0, 2.0, 3.0, 4.0):
        replicas.now = now
        replicas.say(0, READY, epoch=epoch, step=17)
        replicas.say(1, READY, epoch=epoch, step=15)
    assert replicas.group.waiting_for == "replica 1, whose last plan is step 15"
    replicas.say(1, READY, epoch=epoch, step=17)
    assert replicas.group.waiting_for == ""


def test_a_coordinator_that_is_new_learns_of_the_latest_epoch(replicas: Replicas) -> None:
    replicas.say(0, READY, epoch=EPOCH + 50)
    assert (replicas.group.is_open, replicas.group.epoch) == (False, EPOCH + 50)
    assert replicas.begin() == EPOCH + 51


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"options": {"data_parallel_size": 2, "tensor_parallel_size": 4}},
            "tensor_parallel_size is 4 at replica 1 but 1 at replica 0: give both the same",
        ),
        ({"octavo_version": "0"}, "octavo_version is '0' at replica 1"),
        ({"fingerprint": "abc"}, "the model's fingerprint is abc at replica 1 but abd at replica 0"),
    ],
)
def test_what_does_not_fit_is_named(replicas: Replicas, changes: dict[str, object], words: str) -> None:
    replicas.say(0, COMPLETE, epoch=0, fingerprint="abd")
    assert replicas.agreement.objection(replicas.state(1, COMPLETE, epoch=0)) == ""
    assert words in replicas.agreement.objection(replicas.state(1, COMPLETE, epoch=0, **changes))
    objection = replicas.agreement.objection(replicas.state(2, COMPLETE, epoch=0))
    assert objection == "replica 2 is not among data_parallel_size=2"
