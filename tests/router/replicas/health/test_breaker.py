"""When and for how long a replica is left out, and what brings it back; how a stall differs from long work."""

import pytest

from router.replicas.health.breaker import Breaker, Progress


def _open_seconds(breaker: Breaker, now: float) -> float:
    """Seconds from now until a request may go there again."""
    return next(seconds for seconds in range(10_000) if breaker.allows(now + seconds))


def _break(breaker: Breaker, now: float, times: int = 3) -> list[bool]:
    return [breaker.broke(now + i) for i in range(times)]


def test_sessions_that_break_again_and_again_open_it_and_rare_ones_do_not() -> None:
    breaker = Breaker()
    assert not any(breaker.broke(i * 31.0) for i in range(10))
    assert breaker.allows(300.0)
    assert _break(breaker, 400.0) == [False, False, True]
    assert not breaker.allows(402.1)
    assert breaker.describe(402.0) == "left out for 5 s more: Sessions that broke within 60 s: 3"


def test_requests_that_fail_in_a_row_open_it_and_those_between_others_do_not() -> None:
    breaker = Breaker()
    for i in range(20):
        assert not breaker.failed(i)
        if i % 4 == 3:
            breaker.finished(i)
    assert [breaker.failed(20 + i) for i in range(5)] == [False] * 4 + [True]


def test_one_request_after_the_other_probes_it_and_a_token_closes_it() -> None:
    breaker = Breaker()
    _break(breaker, 0.0)
    # Tokens that come while it is open do not close it: Sessions still break.
    breaker.delivered(3.0)
    assert not breaker.allows(6.9)
    assert breaker.allows(7.0)
    breaker.sent(7.0)
    assert not breaker.allows(8.0)
    assert breaker.describe(8.0).startswith("on probation: ")
    # The probe's client may have gone, so another probe is allowed later.
    assert breaker.allows(17.0)
    breaker.sent(17.0)
    breaker.delivered(18.0)
    assert breaker.describe(18.0) == ""
    assert all(breaker.allows(18.0 + i) for i in range(3))


@pytest.mark.parametrize("failure", ["broke", "failed"])
def test_a_probe_that_fails_opens_it_for_twice_as_long_up_to_a_bound(failure: str) -> None:
    breaker, now, seconds = Breaker(), 0.0, []
    _break(breaker, 0.0)
    now = 2.0
    for _ in range(9):
        seconds.append(_open_seconds(breaker, now))
        now += seconds[-1]
        breaker.sent(now)
        assert getattr(breaker, failure)(now)
    assert seconds == [5, 10, 20, 40, 80, 160, 320, 600, 600]


def test_it_forgets_once_it_has_been_closed_for_long() -> None:
    breaker = Breaker()
    for closed_at, again_at, seconds in ((10.0, 100.0, 10), (200.0, 600.0, 5)):
        _break(breaker, closed_at - 8.0)
        breaker.delivered(closed_at + 30.0)
        _break(breaker, again_at)
        assert _open_seconds(breaker, again_at + 2) == seconds
        breaker.delivered(again_at + 30.0)


def test_a_stall_opens_it_at_once_for_its_own_time_and_a_step_closes_it() -> None:
    breaker = Breaker()
    assert breaker.stalled(100.0, 60.0)
    assert _open_seconds(breaker, 100.0) == 60
    assert not breaker.failed(101.0)
    breaker.delivered(110.0)
    assert breaker.allows(110.0)


# --- Progress


def test_only_work_without_steps_is_a_stall() -> None:
    progress = Progress(30.0)
    progress.advance(0.0, epoch=1, last_step=0)
    # Idle for a long time, then a prompt of many steps, then waiting for workers that come back.
    assert not progress.is_overdue(1000.0, has_work=False)
    for step in range(1, 10):
        assert progress.advance(1000.0 + 29 * step, epoch=1, last_step=step)
        assert not progress.is_overdue(1000.0 + 29 * step, has_work=True)
    assert progress.advance(1285.0, epoch=2, last_step=9)
    assert not progress.is_overdue(1314.9, has_work=True)
    assert not progress.is_stalled
    assert progress.is_overdue(1315.0, has_work=True)
    assert progress.is_stalled
    # Reported once per timeout.
    assert not progress.is_overdue(1316.0, has_work=True)
    assert progress.is_overdue(1345.0, has_work=True)
    # Losing its work does not end the stall; a step does.
    assert not progress.is_overdue(1400.0, has_work=False)
    assert progress.is_stalled
    progress.advance(1401.0, epoch=2, last_step=10)
    assert not progress.is_stalled


def test_without_a_timeout_nothing_is_a_stall() -> None:
    progress = Progress(0.0)
    progress.advance(0.0, epoch=1, last_step=0)
    assert not progress.is_overdue(1e9, has_work=True)
