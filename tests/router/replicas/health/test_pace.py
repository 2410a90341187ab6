"""Which replicas count as slow, what they get, and how they come back: in virtual time, over a linear cost of steps."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.scheduler_pb2 import Load
from router.replicas.health.pace import Pace, PaceSettings, State

SETTINGS = PaceSettings(slow_factor=3.0, handover_factor=6.0, max_share=0.34, window=10.0)
# Seconds between two Loads of a replica.
TICK_S = 0.25


@dataclass
class Replica:
    """A replica that computes steps without pause: each takes a fixed time, and more for each token and each token of
    context."""

    pace: Pace
    load: Load
    # Times as slow as it should be.
    factor: float = 1.0
    batch: int = 8
    context: int = 500
    # 0: all steps take the same time for the same size.
    noise: float = 0.0

    @property
    def step_seconds(self) -> float:
        return self.factor * (0.01 + 0.0005 * self.batch + 1e-6 * self.batch * self.context)

    def run(self, seconds: float, rng: random.Random) -> None:
        took = self.step_seconds * (1 + self.noise * rng.uniform(-1, 1))
        num_steps = max(1, round(seconds / took))
        self.load.last_step += num_steps
        self.load.step_seconds += num_steps * took
        self.load.step_tokens += num_steps * self.batch
        self.load.step_context_tokens += num_steps * self.batch * self.context


class Fleet:
    def __init__(self, count: int, pace_settings: PaceSettings = SETTINGS, fingerprint: str = "one") -> None:
        paces: list[Pace] = []
        self.replicas = [Replica(Pace(pace_settings, paces), Load()) for _ in range(count)]
        self.now = 1000.0
        self.rng = random.Random(1)
        # (seconds since the beginning, replica, state)
        self.changes: list[tuple[float, int, State]] = []
        for replica in self.replicas:
            replica.pace.begin(self.now, fingerprint, replica.load)

    def run(self, seconds: float, *, idle: tuple[int, ...] = ()) -> None:
        """Replicas that are left out or idle compute nothing."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            for number, replica in enumerate(self.replicas):
                if replica.pace.state is not State.LEFT_OUT and number not in idle:
                    replica.run(TICK_S, self.rng)
                if replica.pace.note(self.now, replica.load):
                    self.changes.append((self.now - 1000.0, number, replica.pace.state))

    @property
    def states(self) -> list[State]:
        return [replica.pace.state for replica in self.replicas]


def test_a_replica_ten_times_slower_is_left_out_and_comes_back_over_probes() -> None:
    fleet = Fleet(3)
    slow = fleet.replicas[1]
    fleet.run(20)
    slow.factor = 10.0
    fleet.run(15)
    assert fleet.states == [State.FULL, State.LEFT_OUT, State.FULL]
    assert not slow.pace.takes(0)
    slow.factor = 1.0
    fleet.run(60)
    assert fleet.states == [State.FULL] * 3
    assert [state for _, number, state in fleet.changes if number == 1][-4:] == [
        State.LEFT_OUT,
        State.PROBED,
        State.SLOW,
        State.FULL,
    ]
    assert {number for _, number, _ in fleet.changes} == {1}


def test_a_replica_four_times_slower_gets_one_request_in_four() -> None:
    fleet = Fleet(3)
    slow = fleet.replicas[0]
    slow.factor = 4.0
    fleet.run(30)
    assert fleet.states == [State.SLOW, State.FULL, State.FULL]
    assert [slow.pace.takes(50) for _ in range(8)].count(True) == 2
    assert all(fleet.replicas[1].pace.takes(50) for _ in range(8))
    slow.factor = 2.5
    fleet.run(30)
    # Not as slow as to be found, not as fast as to be forgiven.
    assert slow.pace.state is State.SLOW
    slow.factor = 1.5
    fleet.run(30)
    assert slow.pace.state is State.FULL


def test_it_is_left_out_for_twice_as_long_each_time_up_to_a_bound() -> None:
    fleet = Fleet(3)
    fleet.replicas[2].factor = 20.0
    fleet.run(1500)
    left = [at for at, _, state in fleet.changes if state is State.LEFT_OUT]
    probed = [at for at, _, state in fleet.changes if state is State.PROBED]
    seconds = [round(back - out) for out, back in zip(left, probed, strict=False)]
    assert seconds[:6] == [30, 60, 120, 240, 300, 300]
    # Few probes at a time.
    pace = fleet.replicas[2].pace
    while pace.state is not State.PROBED:
        fleet.run(TICK_S)
    assert (pace.takes(3), pace.takes(4)) == (True, False)


def test_longer_batches_and_contexts_are_not_slow() -> None:
    for batch, context in ((256, 500), (8, 100_000), (256, 20_000), (1, 1)):
        fleet = Fleet(3)
        unusual = fleet.replicas[0]
        unusual.batch, unusual.context = batch, context
        fleet.run(60)
        assert fleet.states == [State.FULL] * 3, (batch, context)
        # Slowness of 10 shows all the same where the sizes are no worse than twice the others'.
    fleet = Fleet(3)
    fleet.replicas[0].batch, fleet.replicas[0].factor = 16, 10.0
    fleet.run(60)
    assert fleet.states[0] is State.LEFT_OUT


def test_of_two_replicas_only_a_clear_factor_counts() -> None:
    for factor, state in ((5.0, State.FULL), (7.0, State.SLOW), (13.0, State.LEFT_OUT)):
        fleet = Fleet(2)
        fleet.replicas[0].factor = factor
        fleet.run(20)
        assert fleet.states == [state, State.FULL], factor


def test_too_few_data_say_nothing() -> None:
    alone = Fleet(1)
    alone.replicas[0].factor = 100.0
    alone.run(60)
    assert alone.states == [State.FULL]
    fleet = Fleet(3)
    fleet.replicas[0].factor = 100.0
    # Too short, then with nobody to compare with, then with those of long ago.
    fleet.run(3)
    assert fleet.states == [State.FULL] * 3
    fleet = Fleet(3)
    fleet.run(10, idle=(0,))
    fleet.run(31, idle=(0, 1, 2))
    fleet.replicas[0].factor = 100.0
    fleet.run(30, idle=(1, 2))
    assert fleet.states == [State.FULL] * 3


def test_replicas_of_another_fingerprint_are_not_compared() -> None:
    fleet = Fleet(4)
    for other in fleet.replicas[2:]:
        other.pace.begin(fleet.now, "two", other.load)
        other.factor = 20.0
    fleet.run(60)
    assert fleet.states == [State.FULL] * 4


def test_short_steps_are_not_compared_by_noise() -> None:
    fleet = Fleet(3)
    for replica in fleet.replicas:
        replica.factor = 0.03
    fleet.replicas[0].factor = 0.3
    fleet.run(60)
    assert fleet.states == [State.FULL] * 3


def test_a_much_worse_one_takes_the_place_of_a_mild_one() -> None:
    fleet = Fleet(5)
    mild, bad = fleet.replicas[:2]
    mild.factor = 4.0
    fleet.run(20)
    assert mild.pace.state is State.SLOW
    bad.factor = 30.0
    fleet.run(20)
    assert fleet.states == [State.FULL, State.LEFT_OUT, State.FULL, State.FULL, State.FULL]


def test_new_workers_are_probed_at_once() -> None:
    fleet = Fleet(3)
    slow = fleet.replicas[0]
    slow.factor = 10.0
    fleet.run(15)
    assert slow.pace.state is State.LEFT_OUT
    slow.pace.end()
    slow.load, slow.factor = Load(), 1.0
    slow.pace.begin(fleet.now, "one", slow.load)
    fleet.run(1)
    assert slow.pace.state is State.PROBED
    fleet.run(30)
    assert slow.pace.state is State.FULL


def test_with_a_factor_of_0_nothing_is_slow() -> None:
    fleet = Fleet(3, PaceSettings())
    fleet.replicas[0].factor = 100.0
    fleet.run(60)
    assert fleet.states == [State.FULL] * 3


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 512), st.integers(1, 30_000)), min_size=2, max_size=9),
    noise=st.floats(0, 0.5),
    seed=st.integers(0, 99),
)
def test_replicas_of_equal_speed_are_never_slow(sizes: list[tuple[int, int]], noise: float, seed: int) -> None:
    fleet = Fleet(len(sizes))
    fleet.rng = random.Random(seed)
    for replica in fleet.replicas:
        replica.noise = noise
    for _ in range(8):
        for replica in fleet.replicas:
            replica.batch, replica.context = fleet.rng.choice(sizes)
        fleet.run(fleet.rng.choice((0.5, 3.0, 12.0)), idle=(fleet.rng.randrange(len(sizes)),))
    assert not fleet.changes


@settings(max_examples=25, deadline=None)
@given(
    factors=st.lists(st.sampled_from((1.0, 1.0, 1.0, 4.0, 10.0, 40.0)), min_size=1, max_size=12),
    share=st.sampled_from((0.0, 0.2, 0.34, 0.5)),
    seed=st.integers(0, 99),
)
def test_no_more_than_the_share_is_ever_treated_as_slow(factors: list[float], share: float, seed: int) -> None:
    changed = PaceSettings(slow_factor=3.0, handover_factor=6.0, max_share=share, window=10.0)
    fleet, rng = Fleet(len(factors), changed), random.Random(seed)
    bound = max(1, int(share * len(factors)))
    for _ in range(6):
        for replica in fleet.replicas:
            replica.factor = rng.choice(factors)
        for _ in range(20):
            fleet.run(1.0)
            assert sum(state is not State.FULL for state in fleet.states) <= bound
    # Once all are equally fast again, none stays out.
    for replica in fleet.replicas:
        replica.factor = 1.0
    fleet.run(150)
    assert fleet.states == [State.FULL] * len(factors)


@pytest.mark.parametrize("count", [3, 9])
def test_a_fleet_that_slows_down_together_has_no_slow_replica(count: int) -> None:
    fleet = Fleet(count)
    fleet.run(30)
    for replica in fleet.replicas:
        replica.factor = 20.0
    fleet.run(60)
    assert not fleet.changes
