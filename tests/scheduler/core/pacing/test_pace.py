"""The time that prefills have in a step, and how it follows what steps take."""

import pytest

from scheduler.core.pacing.pace import Pace, StepTiming
from scheduler.core.pacing.prices import StepWork, pairs_of

TOKEN = 0.001


class Clock:
    """Steps of prefills that each take TOKEN seconds a token, times `slowness`, one after the other."""

    def __init__(self, target: float = 0.1, least_tokens: int = 4) -> None:
        self.pace, self.now, self.slowness = Pace(target, least_tokens=least_tokens), 100.0, 1.0

    def step(self, num_tokens: int, *, num_decodes: int = 0, is_limited: bool = False) -> float:
        work = StepWork(num_prefill_tokens=num_tokens, num_pairs=pairs_of(0, num_tokens), num_decode_tokens=num_decodes)
        timing = StepTiming(work=work, planned_at=self.now, is_limited=is_limited, predicted=self.pace.predict(work))
        self.now += self.slowness * TOKEN * (num_tokens + num_decodes)
        return self.pace.note_return(timing, self.now, num_steps=1)

    def most_tokens(self, num_decodes: int = 0, *, start: int = 0, num_steps: int = 1) -> int:
        return self.pace.limit(StepWork(num_decode_tokens=num_decodes), num_steps=num_steps).num_tokens(start)

    def learn(self) -> None:
        for _ in range(100):
            for num_tokens, num_decodes in ((200, 0), (50, 10), (0, 40), (10, 0), (100, 30)):
                self.step(num_tokens, num_decodes=num_decodes)


def test_decodes_leave_the_rest_of_the_time_to_prefills():
    clock = Clock()
    clock.learn()
    assert clock.most_tokens() == pytest.approx(100, abs=3)
    assert clock.most_tokens(60) == pytest.approx(40, abs=3)


def test_some_tokens_are_computed_whatever_the_decodes_take():
    clock = Clock(least_tokens=4)
    clock.learn()
    for num_decodes in (99, 500):
        limit = clock.pace.limit(StepWork(num_decode_tokens=num_decodes), num_steps=1)
        assert limit.num_tokens(0) == limit.num_tokens(100_000) == 4
        assert not limit.is_used
        limit.spend(3, 0)
        assert (limit.num_tokens(0), limit.is_used) == (1, True)
        assert limit.num_drafts == 0


def test_a_prefill_takes_its_time_from_those_behind_it():
    clock = Clock()
    clock.learn()
    limit = clock.pace.limit(StepWork(), num_steps=1)
    limit.spend(70, 0)
    assert limit.num_tokens(0) == pytest.approx(30, abs=3)
    assert limit.num_drafts == pytest.approx(30, abs=3)
    limit.spend(limit.num_tokens(0), 0)
    assert limit.num_tokens(0) == 0


def test_where_a_sequence_waits_for_several_steps_each_has_its_share():
    clock = Clock()
    clock.learn()
    assert clock.most_tokens(num_steps=2) == pytest.approx(50, abs=3)


def test_before_steps_are_measured_budgets_grow_by_doubling():
    clock, budgets = Clock(target=10.0), []
    for _ in range(6):
        budgets.append(clock.most_tokens())
        clock.step(budgets[-1], is_limited=True)
    assert budgets == [64, 128, 256, 512, 1024, 2048]


def test_slow_times_make_steps_shorter_at_once_and_quick_ones_longer_later():
    clock = Clock()
    clock.learn()
    before, clock.slowness, late = clock.most_tokens(), 2.0, []
    for _ in range(60):
        late.append(clock.step(clock.most_tokens(), is_limited=True) > clock.pace.target)
    assert all(late[:3])
    # The margin balances at three late steps of a hundred.
    assert sum(late[20:]) <= 4
    assert clock.most_tokens() < 0.6 * before
    clock.slowness = 1.0
    for _ in range(600):
        clock.step(clock.most_tokens(), is_limited=True)
    assert clock.most_tokens() > 0.9 * before


def test_steps_far_from_their_limit_do_not_move_the_margin():
    clock = Clock()
    clock.learn()
    before = clock.pace.save().margin
    clock.slowness = 3.0
    clock.step(20, is_limited=True)
    clock.step(200)
    assert clock.pace.save().margin == before


def test_a_step_begins_when_the_one_before_it_returns():
    pace = Pace(0.1, least_tokens=4)
    early = StepTiming(work=StepWork(num_decode_tokens=1), planned_at=1.0)
    second = StepTiming(work=StepWork(num_decode_tokens=1), planned_at=1.5)
    assert pace.note_return(early, 2.0, num_steps=1) == 1.0
    assert pace.note_return(second, 2.25, num_steps=1) == 0.25
    # One that computes nothing takes its time as well.
    assert pace.note_return(None, 3.0, num_steps=1) == 0
    assert pace.note_return(second, 3.5, num_steps=1) == 0.5


def test_embeddings_have_a_price_of_their_own():
    clock = Clock()
    clock.learn()
    for num_embeddings in (10, 40) * 20:
        work = StepWork(num_prefill_tokens=20, num_pairs=pairs_of(0, 20), num_embeddings=num_embeddings)
        timing = StepTiming(work=work, planned_at=clock.now)
        clock.now += TOKEN * 20 + 0.002 * num_embeddings
        clock.pace.note_return(timing, clock.now, num_steps=1)
    limit = clock.pace.limit(StepWork(), num_steps=1)
    assert limit.num_embeddings == pytest.approx(50, abs=3)
    assert limit.num_tokens(0, 30) == pytest.approx(40, abs=4)
    limit.note_encoded(30)
    assert limit.num_tokens(0) == pytest.approx(40, abs=4)
    # Those that have been told are not told again.
    limit.note_encoded(30)
    assert limit.num_embeddings == pytest.approx(20, abs=3)
