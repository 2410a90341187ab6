"""Replicas in lockstep send the same steps without messages about each step, and all their work gets computed."""

from collections import deque
from collections.abc import Callable
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from configs.options import Options
from protos import coordination_pb2 as pb
from runtime.awake_time import AwakeTime
from runtime.wire import PROTOCOL_VERSION, octavo_version
from scheduler.lockstep.agreement import Agreement
from scheduler.lockstep.lockstep import WaveError, Waves

EPOCH = 8


class NoRendezvous:
    def address(self, epoch: int, store_address: str) -> str:
        return f"file:{epoch}"

    def remove_all_but(self, epoch: int | None) -> None:
        pass


class Replica:
    """A step loop and its ranks' results. A sequence may be in up to `most` steps at once, or in only one."""

    def __init__(self, number: int, most: int, one_step_each: bool) -> None:
        self.waves, self._most, self._one_step_each = Waves(most), most, one_step_each
        self.state = pb.ReplicaState(
            protocol_version=PROTOCOL_VERSION,
            octavo_version=octavo_version(),
            replica=number,
            instance=number + 1,
            epoch=EPOCH,
            condition=pb.REPLICA_CONDITION_READY,
        )
        # Tokens still to be planned; own tokens of each step sent.
        self.tokens = 0
        self.sent: list[int] = []
        self.num_returned = 0
        self.inbox: deque[int] = deque()
        self.outbox: deque[int] = deque()
        self.results: deque[int] = deque()

    def hear_wave(self) -> None:
        self.waves.announce(self.inbox.popleft())

    def hear_result(self) -> None:
        self.num_returned += 1
        self.waves.note_result(self.num_returned, self.results.popleft())

    def run(self) -> None:
        """Sends steps as scheduler.step_loop does."""
        while True:
            step = len(self.sent) + 1
            in_flight = self.sent[self.num_returned :]
            if not self.waves.holds(step):
                if self.tokens and self.state.wanted_step != step:
                    self.state.wanted_step = step
                    self.outbox.append(step)
                return
            if len(in_flight) == self._most:
                return
            is_held = self._one_step_each and any(in_flight)
            count = min(self.tokens, 0 if is_held else 2)
            self.tokens -= count
            self.sent.append(count)


class Cluster:
    """Replicas whose messages and results take random times but stay in order. Their step loops may run late, and find
    several of them."""

    def __init__(self, choose: Random, num_replicas: int, most: int) -> None:
        self._choose = choose
        self.replicas = [Replica(number, most, choose.random() < 0.5) for number in range(num_replicas)]
        options = Options().model_copy(update={"data_parallel_size": num_replicas})
        self.agreement = Agreement(
            options, NoRendezvous(), AwakeTime(1.0), instance=1, epoch=EPOCH - 1, heartbeat_timeout=10
        )
        for replica in self.replicas:
            state = pb.ReplicaState()
            state.CopyFrom(replica.state)
            state.epoch, state.condition = EPOCH - 1, pb.REPLICA_CONDITION_COMPLETE
            self.agreement.hear(state, 0)
        assert self.agreement.group.is_open
        self.num_computed = 0

    def act(self) -> None:
        """Lets a message or a result arrive, or a step loop run."""
        self._choose.choice(self._arrivals() + [replica.run for replica in self.replicas])()

    def _arrivals(self) -> list[Callable[[], None]]:
        actions = []
        for replica in self.replicas:
            actions += [replica.hear_wave] * bool(replica.inbox) + [replica.hear_result] * bool(replica.results)
            actions += [lambda replica=replica: self._hear(replica)] * bool(replica.outbox)
        if all(len(replica.sent) > self.num_computed for replica in self.replicas):
            actions.append(self._compute)
        return actions

    def _hear(self, replica: Replica) -> None:
        before = self.agreement.group.wave_step
        state = pb.ReplicaState()
        state.CopyFrom(replica.state)
        state.wanted_step = replica.outbox.popleft()
        self.agreement.hear(state, 0)
        if self.agreement.group.wave_step != before:
            for each in self.replicas:
                each.inbox.append(self.agreement.group.wave_step)

    def _compute(self) -> None:
        tokens = sum(replica.sent[self.num_computed] for replica in self.replicas)
        self.num_computed += 1
        for replica in self.replicas:
            replica.results.append(tokens)

    def settle(self) -> None:
        for _ in range(10_000):
            for _ in range(20):
                self.act()
            for replica in self.replicas:
                replica.run()
            if not self._arrivals():
                return
        raise AssertionError("it does not come to rest")


@given(seed=st.integers(0, 2**32), num_replicas=st.integers(1, 4), most=st.integers(1, 4))
@settings(max_examples=150, derandomize=True, deadline=None)
def test_replicas_never_disagree_and_come_to_rest(seed: int, num_replicas: int, most: int) -> None:
    choose = Random(seed)
    cluster = Cluster(choose, num_replicas, most)
    total = 0
    for _ in range(choose.randrange(12)):
        for _ in range(choose.choice([0, 1, 3, 30])):
            cluster.act()
        if choose.random() < 0.3:
            cluster.settle()
        count = choose.choice([1, 2, 9])
        total += count
        choose.choice(cluster.replicas).tokens += count
    cluster.settle()
    first, *others = cluster.replicas
    # All send the same steps, in the same waves.
    for other in others:
        assert (len(other.sent), other.waves.num_begun) == (len(first.sent), first.waves.num_begun)
    assert cluster.num_computed == first.num_returned == len(first.sent)
    assert sum(sum(replica.sent) for replica in cluster.replicas) == total


def test_a_wave_lasts_while_somebody_computes_and_little_longer() -> None:
    waves = Waves(2)
    assert not waves.holds(1)
    waves.announce(1)
    # A sequence that is in one step at a time leaves every other step empty.
    for step, num_tokens in enumerate([5, 0, 1, 0, 1], start=1):
        waves.note_result(step, num_tokens)
        assert waves.holds(step + 2)
    waves.note_result(6, 0)
    waves.note_result(7, 0)
    assert waves.holds(8)
    assert not waves.holds(9)
    # Work in its last steps does not prolong a wave.
    waves.note_result(8, 3)
    assert not waves.holds(9)
    waves.announce(1)
    assert not waves.holds(9)
    waves.announce(9)
    assert waves.holds(9)
    assert waves.num_begun == 2


def test_a_wave_s_last_steps_are_sent_though_the_next_one_has_begun() -> None:
    waves = Waves(2)
    waves.announce(1)
    # Both results and the next wave's begin arrive before the loop sends step 3, the last one of the first wave.
    waves.note_result(1, 0)
    waves.note_result(2, 0)
    waves.announce(4)
    assert waves.holds(3)
    assert waves.num_begun == 2


def test_a_wave_that_begins_elsewhere_than_the_last_one_ends_is_an_error() -> None:
    waves = Waves(1)
    waves.announce(1)
    waves.announce(4)
    waves.note_result(1, 1)
    with pytest.raises(WaveError, match="should begin at step 4, but the previous one ends before step 3"):
        waves.note_result(2, 0)
