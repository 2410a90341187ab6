"""The step that is awaited, since when the workers may have been computing it, and the sums over past ones."""

import numpy as np

from scheduler.core.messages import Plan
from scheduler.ranks.step_wire import StepClock, StepTotals


def _plan(step: int, *, num_decodes: int = 1, context: int = 0) -> Plan:
    return Plan(step=step, decode_rows=np.arange(num_decodes, dtype=np.uint16), num_context_tokens=context)


def test_a_step_behind_another_begins_when_that_one_returns():
    clock = StepClock()
    assert (clock.awaited, clock.elapsed(50.0)) == (None, 0.0)
    clock.send(_plan(1), 10.0)
    clock.send(_plan(2), 11.0)
    assert (clock.awaited, clock.elapsed(14.0)) == (1, 4.0)
    clock.finish(15.0)
    assert (clock.awaited, clock.elapsed(16.0)) == (2, 1.0)
    clock.finish(17.0)
    # The next step is sent after the workers were idle.
    clock.send(_plan(3), 30.0)
    assert (clock.awaited, clock.elapsed(31.0)) == (3, 1.0)
    clock.clear()
    assert (clock.awaited, clock.elapsed(99.0)) == (None, 0.0)


def test_steps_in_flight_return_one_after_the_other():
    clock = StepClock()
    assert clock.left(50.0) == 0.0
    clock.send(_plan(1), 10.0, 2.0)
    assert clock.left(11.0) == 1.0
    clock.send(_plan(2), 11.0, 3.0)
    assert clock.left(11.0) == 4.0
    clock.finish(11.5)
    assert clock.left(12.0) == 2.5
    assert clock.left(15.0) == -0.5


def test_totals_leave_out_idle_times_and_steps_that_never_return():
    clock = StepClock()
    clock.send(_plan(1, num_decodes=3, context=40), 10.0)
    clock.send(_plan(2, num_decodes=2, context=30), 11.0)
    clock.finish(15.0)
    clock.finish(17.0)
    clock.send(_plan(3, num_decodes=9, context=900), 30.0)
    clock.clear()
    assert clock.totals == StepTotals(num_steps=2, seconds=7.0, num_tokens=5, num_context_tokens=70)
