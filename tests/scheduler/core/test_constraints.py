"""Sequences with a constraint: held where workers need their results, forced tokens as drafts, ends with a message."""

import dataclasses

import pytest

from runtime.wire import MAX_FORCED_TOKENS
from scheduler.core.core import Core
from scheduler.core.messages import FinishReason, Plan
from tests.support.scheduler.core import make_request, make_result, make_settings, tokens_of


def begun(*, constrained: tuple[int, ...] = (1,), **settings: object) -> tuple[Core, list[Plan]]:
    """A core that has planned the prompts of requests 1 and 2, and as many steps behind them as it can."""
    core = Core(make_settings(**({"max_steps_in_flight": 2} | settings)))
    for group in (1, 2):
        assert (
            core.submit(make_request(group, [group], max_tokens=50, is_constrained=group in constrained), 0.0) is None
        )
    plans = []
    while (plan := core.schedule(0.0)) is not None:
        plans.append(plan)
    return core, plans


def rows_of(plan: Plan | None) -> list[int]:
    assert plan is not None
    return sorted(row for row, _ in plan.batch)


def test_only_constrained_sequences_are_held() -> None:
    core, plans = begun(holds_constrained=True)
    assert [rows_of(plan) for plan in plans] == [[0, 1], [1]]
    core.apply(make_result(1, (1, 0, 5), (2, 0, 6)), 0.0)
    assert rows_of(core.schedule(0.0)) == [0, 1]
    core.apply(make_result(2, (2, 1, 6)), 0.0)
    assert rows_of(core.schedule(0.0)) == [1]
    # Where workers know the token first, none is held.
    _, plans = begun(holds_constrained=False)
    assert [rows_of(plan) for plan in plans] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(("num_forced", "waits"), [(2, False), (3, True), (MAX_FORCED_TOKENS + 4, True)])
def test_a_sequence_waits_for_the_step_in_flight_if_enough_tokens_are_forced(num_forced: int, waits: bool) -> None:
    core, _ = begun()
    forced = tuple(range(7, 7 + num_forced))
    core.apply(make_result(1, (1, 0, 5), (2, 0, 6), drafts={1: forced}), 0.0)
    assert rows_of(core.schedule(0.0)) == ([1] if waits else [0, 1])
    # The next result brings the tokens that are still forced.
    core.apply(make_result(2, (1, 1, 7), (2, 1, 6), drafts={1: (*forced[1:], 99)}), 0.0)
    plan = core.schedule(0.0)
    assert plan is not None
    assert plan.drafts == ([(0, (*forced[1:], 99)[:MAX_FORCED_TOKENS])] if waits else [])
    assert 1 in plan.decode_rows.tolist()
    if waits:
        # Until they are verified, it is in no other step; the other sequence goes on.
        core.apply(make_result(3, (2, 2, 6)), 0.0)
        assert rows_of(core.schedule(0.0)) == [1]
    core.check_integrity()


def test_nothing_is_forced_where_layers_carry_a_state() -> None:
    """Their states cannot go back over a draft that is rejected. A sequence does not wait for drafts either."""
    core, _ = begun(carries_states=True, max_forced_tokens=0)
    core.apply(make_result(1, (1, 0, 5), (2, 0, 6), drafts={1: (7, 8, 9, 10)}), 0.0)
    assert rows_of(core.schedule(0.0)) == [0, 1]
    core.apply(make_result(2, (1, 1, 7), (2, 1, 6), drafts={1: (8, 9, 10)}), 0.0)
    plan = core.schedule(0.0)
    assert rows_of(plan) == [0, 1]
    assert plan is not None
    assert not plan.drafts


def test_a_core_that_is_restored_goes_on_waiting() -> None:
    core, _ = begun()
    core.apply(make_result(1, (1, 0, 5), (2, 0, 6), drafts={1: (7, 8, 9)}), 0.0)
    again = Core(core.settings)
    again.restore(core.save())
    assert rows_of(again.schedule(0.0)) == rows_of(core.schedule(0.0)) == [1]


def test_sequences_without_a_constraint_get_no_forced_tokens() -> None:
    core, _ = begun(constrained=(), max_steps_in_flight=1)
    core.apply(make_result(1, (1, 0, 5), (2, 0, 6), drafts={1: (7, 8, 9, 10)}), 0.0)
    plan = core.schedule(0.0)
    assert plan is not None
    assert not plan.drafts


def test_a_sequence_that_fails_says_why_and_keeps_the_drafts_before() -> None:
    core, _ = begun(max_steps_in_flight=1)
    core.apply(make_result(1, (1, 0, 5), (2, 0, 6), drafts={1: (7, 8, 9)}), 0.0)
    plan = core.schedule(0.0)
    assert plan is not None
    why = {1: "no token is left at output position 3: the constraint leaves none"}
    result = make_result(2, (2, 1, 6), failed=frozenset({1}), why_failed=why)
    told = dataclasses.replace(
        result,
        sequences=make_result(2, (2, 1, 6), (1, 1, 7)).sequences,
        positions=make_result(2, (2, 1, 6), (1, 1, 7)).positions,
        num_tokens=make_result(2, (0, 1, 0), (0, 2, 0)).positions,
        token_ids=make_result(2, (0, 0, 6), (0, 0, 7), (0, 0, 8)).token_ids,
    )
    outputs = core.apply(told, 0.0)
    assert tokens_of(outputs) == {(2, 0): [6], (1, 0): [7, 8]}
    (end,) = outputs.ends
    assert (end.key, end.reason, end.message, end.no_token) == ((1, 0), FinishReason.ERROR, why[1], True)
    core.check_integrity()
