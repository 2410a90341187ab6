"""The times that a request spent in each phase in its scheduler, as vLLM's metrics count them."""

import pytest

from scheduler.core.messages import Moment
from scheduler.core.state.timelines import Timelines
from scheduler.telemetry.metrics import GroupTimes


def timelines_of(*moments: tuple[Moment, float, int]) -> Timelines:
    """Timelines in which group 7 has these entries: (moment, time, choice)."""
    timelines = Timelines(max_finished=4)
    timelines.begin(7, "r")
    for moment, time, choice in moments:
        timelines.add(7, moment, time, choice=choice)
    return timelines


def times_of(*moments: tuple[Moment, float, int]) -> GroupTimes:
    timelines = timelines_of(*moments)
    timelines.finish(7)
    timeline = timelines.of(7)
    assert timeline is not None
    return GroupTimes.of(timeline)


def test_a_preemption_counts_to_what_it_interrupted_and_the_last_choice_ends_the_group():
    times = times_of(
        (Moment.QUEUED, 1.0, 0),
        (Moment.QUEUED, 1.0, 1),
        (Moment.ADMITTED, 3.0, 0),
        (Moment.SCHEDULED, 3.0, 0),
        (Moment.DECODING, 4.0, 0),
        (Moment.ADMITTED, 4.5, 1),
        (Moment.DECODING, 5.0, 1),
        (Moment.PREEMPTED, 6.0, 1),
        (Moment.FINISHED, 8.0, 0),
        (Moment.RESUMED, 9.0, 1),
        (Moment.DECODING, 10.0, 1),
        (Moment.FINISHED, 12.0, 1),
    )
    assert (times.in_queue, times.in_prefill, times.in_decode, times.in_inference) == (2.0, 1.0, 8.0, 9.0)


@pytest.mark.parametrize(
    ("moments", "expected"),
    [
        ([(Moment.QUEUED, 1.0, 0), (Moment.FINISHED, 4.0, 0)], (3.0, None, None, None)),
        ([(Moment.QUEUED, 1.0, 0), (Moment.ADMITTED, 2.0, 0), (Moment.FINISHED, 4.0, 0)], (1.0, None, None, 2.0)),
    ],
)
def test_what_it_never_got_to_has_no_time(moments, expected):
    times = times_of(*moments)
    assert (times.in_queue, times.in_prefill, times.in_decode, times.in_inference) == expected


def test_a_timeline_is_found_by_its_group_while_it_lives_and_among_the_latest_afterwards():
    timelines = timelines_of((Moment.QUEUED, 1.0, 0))
    live = timelines.of(7)
    assert live is not None
    assert not live.is_finished
    timelines.finish(7)
    for group in range(8, 11):
        timelines.begin(group, "others")
        timelines.add(group, Moment.QUEUED, 2.0, choice=0)
        timelines.finish(group)
    finished = timelines.of(7)
    assert finished is not None
    assert finished.is_finished
    timelines.begin(11, "one too many")
    timelines.finish(11)
    assert timelines.of(7) is None
