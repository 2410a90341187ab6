"""The step that is awaited, and since when the workers may have been computing it."""

from scheduler.ranks.step_wire import StepClock


def test_a_step_behind_another_begins_when_that_one_returns():
    clock = StepClock()
    assert (clock.awaited, clock.elapsed(50.0)) == (None, 0.0)
    clock.send(1, 10.0)
    clock.send(2, 11.0)
    assert (clock.awaited, clock.elapsed(14.0)) == (1, 4.0)
    clock.finish(15.0)
    assert (clock.awaited, clock.elapsed(16.0)) == (2, 1.0)
    clock.finish(17.0)
    # The next step is sent after the workers were idle.
    clock.send(3, 30.0)
    assert (clock.awaited, clock.elapsed(31.0)) == (3, 1.0)
    clock.clear()
    assert (clock.awaited, clock.elapsed(99.0)) == (None, 0.0)
