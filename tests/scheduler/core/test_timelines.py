"""Timelines keep what people ask for; the numbers of entries and of finished requests are bounded."""

import pytest

from scheduler.core.messages import Moment, TimelineEntry
from scheduler.core.state.timelines import Timelines


def test_entries_come_back_as_they_were_told():
    timelines = Timelines(max_finished=2)
    timelines.begin(7, "a")
    timelines.add(7, Moment.QUEUED, 1.0, choice=0, num_tokens=10)
    timelines.add(7, Moment.SCHEDULED, 1.5, choice=0, step=3, num_tokens=6)
    timelines.add(7, Moment.PREEMPTED, 2.0, choice=0, step=4, num_tokens=16, reason="no_blocks")
    (timeline,) = timelines.explain("a")
    assert timeline.request_id == "a"
    assert not timeline.is_finished
    assert not timeline.num_dropped
    assert timeline.entries == (
        TimelineEntry(moment=Moment.QUEUED, time=1.0, choice=0, num_tokens=10),
        TimelineEntry(moment=Moment.SCHEDULED, time=1.5, choice=0, step=3, num_tokens=6),
        TimelineEntry(moment=Moment.PREEMPTED, time=2.0, choice=0, step=4, num_tokens=16, reason="no_blocks"),
    )
    assert timelines.explain("b") == []


def test_attempts_of_one_request_come_oldest_first_whatever_has_finished():
    timelines = Timelines(max_finished=2)
    for group, time in ((5, 1.0), (3, 2.0), (4, 3.0)):
        timelines.begin(group, "a")
        timelines.add(group, Moment.QUEUED, time, choice=0)
    timelines.finish(3)
    assert [(t.entries[0].time, t.is_finished) for t in timelines.explain("a")] == [
        (1.0, False),
        (2.0, True),
        (3.0, False),
    ]


@pytest.mark.parametrize("max_finished", [0, 3])
def test_only_the_latest_finished_requests_are_kept(max_finished):
    timelines = Timelines(max_finished)
    for group in range(10):
        timelines.begin(group, f"request-{group}")
        timelines.add(group, Moment.FINISHED, float(group), choice=0, reason="stop")
        timelines.finish(group)
    known = [group for group in range(10) if timelines.explain(f"request-{group}")]
    assert known == list(range(10 - max_finished, 10))
    timelines.check_integrity(())


def test_a_very_long_timeline_keeps_its_beginning_and_its_end_and_counts_the_rest():
    timelines = Timelines(max_finished=1)
    timelines.begin(1, "a")
    timelines.begin(2, "b")
    for index in range(1000):
        timelines.add(1, Moment.CHUNKED, float(index), choice=0, step=index, num_tokens=2048)
    for index in range(256):
        timelines.add(2, Moment.CHUNKED, float(index), choice=0, step=index)
    (long,), (full,) = timelines.explain("a"), timelines.explain("b")
    assert [entry.step for entry in long.entries] == [*range(128), *range(872, 1000)]
    assert long.num_dropped == 744
    assert [entry.step for entry in full.entries] == [*range(256)]
    assert not full.num_dropped


def test_integrity_sees_a_group_without_a_timeline_and_a_timeline_without_a_group():
    timelines = Timelines(max_finished=1)
    timelines.begin(1, "a")
    timelines.add(1, Moment.QUEUED, 0.0, choice=0)
    timelines.check_integrity({1})
    for live in ((), (1, 2)):
        with pytest.raises(AssertionError):
            timelines.check_integrity(live)
    timelines.begin(2, "b")
    with pytest.raises(AssertionError, match="no entries"):
        timelines.check_integrity({1, 2})
