"""Waits leave out the time in which this process stood still, and nothing else."""

from runtime.awake_time import AwakeTime


def test_a_late_wake_up_is_a_stall_and_what_a_loop_waits_for_is_none() -> None:
    awake = AwakeTime(1.0)
    for now in (100.0, 100.5, 101.5, 102.55):
        awake.wake(now)
    assert (awake.stalled_s, awake.seconds(100.0, 102.55)) == (0.0, 102.55 - 100.0)
    awake.wake(120.0)
    # The loop might have waited until 103.55 anyway.
    assert round(awake.stalled_s, 6) == 16.45
    assert round(awake.seconds(100.0, 121.0), 6) == 4.55


def test_only_the_part_of_a_stall_that_is_within_the_wait_counts() -> None:
    awake = AwakeTime(1.0)
    for now in (0.0, 11.0, 12.0, 23.0):
        awake.wake(now)
    assert awake.seconds(0.0, 23.0) == 3.0
    assert awake.seconds(5.0, 23.0) == 2.0
    assert awake.seconds(11.5, 23.0) == 1.5
    # A peer was heard on another thread while this loop stood still.
    assert awake.seconds(22.0, 23.5) == 0.5
    assert awake.seconds(23.0, 33.0) == 10.0
