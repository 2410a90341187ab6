"""The measured costs of steps, as the core gets them."""

import numpy as np
import pytest

from scheduler.core.messages import FIRST_CHOOSING_SECONDS, Plan
from scheduler.step_costs import StepCostMeter


def plan(num_tokens: int, wanted: list[tuple[int, int]] | None = None) -> Plan:
    return Plan(step=1, decode_rows=np.zeros(num_tokens, np.uint16), wanted_drafts=wanted or [])


def test_costs_are_told_once_there_are_some_and_when_they_change() -> None:
    meter = StepCostMeter()
    for seconds in (9.0, 1.0, 1.1):
        assert meter.take() is None
        meter.note(plan(4), seconds)
    costs = meter.take()
    assert costs is not None
    # The first, slow step does not count.
    assert (costs.num_tokens, costs.seconds, costs.draft_seconds) == ((1, 4), (1.1, 1.1), ())
    meter.note(plan(4), 1.1)
    assert meter.take() is None
    # One step that takes long for another reason hardly counts.
    meter.note(plan(4), 100.0)
    assert meter.take() is None


def test_a_slow_hour_changes_no_cost_but_dearer_tokens_do() -> None:
    meter = StepCostMeter()
    for _ in range(20):
        meter.note(plan(4), 1.0)
        meter.note(plan(8), 1.2)
    costs = meter.take()
    assert costs is not None
    assert costs.seconds == pytest.approx((1.0, 1.0, 1.2))
    # Only steps of 4 tokens fall into the slow time, as when drafts do not pay.
    for _ in range(100):
        meter.note(plan(4), 3.0)
    slow = meter.take() or costs
    assert slow.seconds[2] / slow.seconds[1] == pytest.approx(1.2, rel=0.2)
    for _ in range(100):
        meter.note(plan(4), 3.0)
        meter.note(plan(8), 6.0)
    dearer = meter.take()
    assert dearer is not None
    assert dearer.seconds[2] / dearer.seconds[1] == pytest.approx(2.0, rel=0.1)


def test_a_token_that_begins_a_tile_costs_more_than_the_next_ones() -> None:
    meter = StepCostMeter()
    for _ in range(5):
        for num_tokens, seconds in ((15, 1.0), (16, 1.02), (17, 1.3), (24, 1.29), (32, 1.31)):
            meter.note(plan(num_tokens), seconds)
    costs = meter.take()
    assert costs is not None
    assert costs.num_tokens == (1, 15, 16, 17, 24, 32)
    # A step is not cheaper than a smaller one: what says so is noise.
    assert costs.seconds == pytest.approx((1.0, 1.0, 1.02, 1.295, 1.295, 1.31))


def test_tokens_of_prefills_cost_less_than_drafts_which_need_logits() -> None:
    meter = StepCostMeter()
    for _ in range(5):
        meter.note(plan(4), 1.0)
        meter.note(Plan(step=1, decode_rows=np.zeros(4, np.uint16), chunks=[(4, 96)]), 10.0)
        meter.note(Plan(step=1, decode_rows=np.zeros(4, np.uint16), chunks=[(4, 196)]), 20.0)
    costs = meter.take()
    assert costs is not None
    assert costs.seconds[-2:] == (10.0, 20.0)
    # Steps of other sizes that are about as long and have drafts say how much more.
    for num_drafts in (90, 92, 95):
        with_drafts = Plan(
            step=1,
            decode_rows=np.zeros(4, np.uint16),
            rows_with_drafts=np.array([4], np.uint16),
            num_drafts=np.array([num_drafts], np.int32),
            draft_token_ids=np.zeros(num_drafts, np.int32),
        )
        meter.note(with_drafts, 0.12 * with_drafts.num_tokens)
    costs = meter.take()
    assert costs is not None
    assert costs.seconds[-1] == pytest.approx(24.0, rel=0.05)


def test_what_choosing_drafts_takes_the_scheduler_is_measured() -> None:
    meter = StepCostMeter()
    for _ in range(5):
        meter.note(plan(4), 1.0)
        meter.note_scheduling(2e-4, has_drafts=False)
    costs = meter.take()
    assert costs is not None
    assert costs.choosing_seconds == FIRST_CHOOSING_SECONDS
    for _ in range(5):
        meter.note_scheduling(1e-3, has_drafts=True)
    costs = meter.take()
    assert costs is not None
    assert costs.choosing_seconds == pytest.approx(8e-4)
    assert meter.take() is None


def test_the_time_of_drafting_is_not_that_of_the_step() -> None:
    meter = StepCostMeter()
    for _ in range(5):
        meter.note(plan(1), 1.0)
        meter.note(plan(1, [(0, 4)]), 1.4, 0.4)
    costs = meter.take()
    assert costs is not None
    assert (costs.num_tokens, costs.seconds) == ((1,), (1.0,))
    assert costs.draft_seconds == pytest.approx((0.1,))


def test_drafts_cost_as_much_a_row_for_fewer_rows_and_less_for_more() -> None:
    meter = StepCostMeter()
    for _ in range(5):
        meter.note(plan(1), 1.0)
        meter.note(plan(4, [(row, 2) for row in range(4)]), 2.4, 0.4)
        meter.note(plan(16), 6.0)
        # It only caught up with a long prompt, or did so before it drafted.
        meter.note(plan(4, [(row, 2) for row in range(4)]), 7.0, 5.0, num_drafted=0)
        caught_up = plan(4, [(row, 2) for row in range(4)])
        caught_up.num_catching_up = None
        meter.note(caught_up, 7.0, 5.0)
    costs = meter.take()
    assert costs is not None
    assert (costs.num_tokens, costs.seconds) == ((1, 4, 16), (1.0, 2.0, 6.0))
    # Between 3 and 4 times as much for 4 times the rows.
    assert costs.draft_seconds == pytest.approx((0.05, 0.2, 0.2 * 12**0.5))


def catching_up(num_tokens: int | None) -> Plan:
    each = plan(2, [(0, 4), (1, 4)])
    each.num_catching_up = num_tokens
    return each


def test_what_catching_up_costs_is_measured_apart() -> None:
    meter = StepCostMeter()
    for _ in range(5):
        meter.note(plan(2), 1.0)
        meter.note(catching_up(0), 1.4, 0.4)
        meter.note(catching_up(100), 1.9, 0.9)
        # Nothing is known of these: how many tokens it computed, and whether it has caught up; or there were too few.
        meter.note(catching_up(None), 9.0, 8.0)
        meter.note(catching_up(100), 9.0, 8.0, num_drafted=1)
        meter.note(catching_up(10), 2.0, 1.0)
    costs = meter.take()
    assert costs is not None
    assert costs.draft_seconds == pytest.approx((0.05, 0.1))
    assert costs.catch_up_seconds == pytest.approx(0.005)


def test_a_drafter_that_seems_too_dear_is_tried_again() -> None:
    meter = StepCostMeter()
    for drafting in (0.8, 0.2, 0.2):
        assert not meter.may_have_news
        meter.note(plan(1, [(0, 1)]), 1.0 + drafting, drafting)
    assert meter.may_have_news
    costs = meter.take()
    assert costs is not None
    assert costs.draft_seconds[0] == pytest.approx(0.2)
    for _ in range(1600):
        meter.note(plan(1), 1.0)
    cheaper = meter.take()
    assert cheaper is not None
    assert cheaper.draft_seconds[0] == pytest.approx(0.2 * 0.95**3)
    # A few steps tell whether it is.
    for _ in range(3):
        meter.note(plan(1, [(0, 1)]), 1.4, 0.4)
    dearer = meter.take()
    assert dearer is not None
    assert dearer.draft_seconds[0] > 0.2


def test_a_step_should_take_what_those_of_nearly_as_many_tokens_took() -> None:
    meter = StepCostMeter()
    prompts, longer = (Plan(step=1, decode_rows=np.zeros(0, np.uint16), chunks=[(0, each)]) for each in (400, 500))
    assert meter.expect(plan(4)) == meter.expect(longer) == meter.expect(plan(0)) == 0.0
    # One measurement says enough: who plans too late loses little.
    meter.note(plan(4), 1.5)
    assert meter.expect(plan(5)) == 1.5
    for _ in range(20):
        meter.note(plan(4), 1.0)
        meter.note(plan(8), 2.0)
        meter.note(prompts, 50.0)
    expected = [meter.expect(plan(count)) for count in (3, 4, 7, 8, 30)]
    assert expected == pytest.approx([1.0, 1.0, 1.75, 2.0, 2.0])
    assert (meter.expect(prompts), meter.expect(longer)) == pytest.approx((50.0, 62.5))
    # Other programs slow all steps down.
    for _ in range(20):
        meter.note(plan(8), 4.0)
    assert meter.expect(plan(8)) == pytest.approx(4.0, rel=0.01)
