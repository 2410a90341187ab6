"""`octavo explain`: a request's time is split into the right phases and drawn legibly."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from octavo.client.admin import RequestTimeline, TimelineEntry
from octavo.timeline import Phase, Span, draw, seconds_by_phase, spans_of

Happened = tuple[str, float] | tuple[str, float, int]


def timeline(*happened: Happened, now: float = 100.0, num_dropped: int = 0) -> RequestTimeline:
    """A timeline of these events: (moment, time, choice); choice is 0 by default."""
    entries = tuple(
        TimelineEntry(moment=moment, time=time, choice=choice[0] if choice else 0, step=0, num_tokens=0, reason="")
        for moment, time, *choice in happened
    )
    return RequestTimeline(
        request_id="a",
        replica_id="0",
        entries=entries,
        num_dropped=num_dropped,
        finished=entries[-1].moment == "finished",
        now=now,
    )


def drawn(each: RequestTimeline, width: int = 100) -> str:
    output = io.StringIO()
    draw(each, Console(file=output, width=width, color_system=None))
    return output.getvalue()


PREEMPTED = timeline(
    ("queued", 0.0),
    ("admitted", 1.0),
    ("chunked", 1.0),
    ("chunked", 2.0),
    ("scheduled", 3.0),
    ("decoding", 4.0),
    ("preempted", 6.0),
    ("resumed", 10.0),
    ("scheduled", 10.0),
    ("decoding", 11.0),
    ("finished", 20.0),
)


def test_time_is_told_apart_by_what_happened():
    assert seconds_by_phase(spans_of(PREEMPTED, 0)) == {
        Phase.QUEUED: 1.0,
        Phase.PREFILL: 4.0,
        Phase.DECODE: 11.0,
        Phase.PREEMPTED: 4.0,
        Phase.NOT_KEPT: 0.0,
    }


@pytest.mark.parametrize(
    ("happened", "phase"),
    [
        ([("queued", 0.0)], Phase.QUEUED),
        ([("queued", 0.0), ("admitted", 8.0), ("chunked", 8.0)], Phase.PREFILL),
        ([("queued", 0.0), ("admitted", 8.0), ("scheduled", 8.0), ("decoding", 9.0)], Phase.DECODE),
        ([("queued", 0.0), ("preempted", 9.0)], Phase.PREEMPTED),
    ],
)
def test_a_live_request_is_at_something_until_now(happened: list[Happened], phase: Phase):
    last = spans_of(timeline(*happened, now=12.5), 0)[-1]
    assert last == Span(phase, happened[-1][1], 12.5)


def test_choices_have_times_of_their_own():
    both = timeline(("queued", 0.0), ("queued", 0.0, 1), ("admitted", 2.0), ("admitted", 5.0, 1), ("finished", 7.0))
    assert spans_of(both, 0) == [Span(Phase.QUEUED, 0.0, 2.0), Span(Phase.PREFILL, 2.0, 7.0)]
    assert spans_of(both, 1) == [Span(Phase.QUEUED, 0.0, 5.0), Span(Phase.PREFILL, 5.0, 100.0)]


def test_what_was_not_kept_is_not_made_up():
    long = timeline(("queued", 0.0), ("chunked", 1.0), ("chunked", 8.0), ("finished", 9.0), num_dropped=50)
    assert spans_of(long, 0) == [
        Span(Phase.QUEUED, 0.0, 1.0),
        Span(Phase.NOT_KEPT, 1.0, 8.0),
        Span(Phase.PREFILL, 8.0, 9.0),
    ]
    assert "50 entries not kept" in drawn(long)
    # Nothing more is known about the choice.
    silent = timeline(("queued", 0.0), ("queued", 0.0, 1), ("admitted", 3.0), ("finished", 9.0), num_dropped=50)
    assert spans_of(silent, 1)[-1] == Span(Phase.NOT_KEPT, 0.0, 100.0)


def test_the_drawing_shows_where_the_time_went_without_colours():
    lines = drawn(PREEMPTED).splitlines()
    assert lines[0] == "request a on replica 0, finished after 20.000 s"
    assert "chunked 2 times" in drawn(PREEMPTED)
    bar = "░" * 3 + "▒" * 9 + "█" * 6 + "x" * 12 + "▒" * 3 + "█" * 27
    assert bar in lines
    assert lines[-1].split() == ["seconds", "1.000", "4.000", "11.000", "4.000"]


@pytest.mark.parametrize("width", [20, 60, 200])
def test_a_bar_fits_whatever_the_width(width: int):
    both = timeline(("queued", 0.0), ("queued", 0.0, 3), ("admitted", 33.0), ("finished", 66.0))
    bars = [line for line in drawn(both, width).splitlines() if line.startswith("░")]
    assert [len(bar) for bar in bars] == [round(min(width, 60) * 0.66), min(width, 60)]


def test_a_request_of_no_time_is_drawn():
    assert "no time has passed" in drawn(timeline(("queued", 0.0), now=0.0))


def test_it_tells_of_drafts_if_there_were_any() -> None:
    assert "draft" not in drawn(PREEMPTED)
    assert "finished after 20.000 s; 1,200 of 2,000 draft tokens accepted" in drawn(
        replace(PREEMPTED, num_draft_tokens=2000, num_accepted_tokens=1200)
    )
