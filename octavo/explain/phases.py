"""From what happened to a choice to where its time went."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from octavo.admin import RequestTimeline, TimelineEntry


class Phase(StrEnum):
    """What a choice was at."""

    QUEUED = "queued"
    # Of the prompt, or of what it has to compute again.
    PREFILL = "prefill"
    DECODE = "decode"
    # Without its blocks, until it comes back.
    PREEMPTED = "preempted"
    # Between the entries kept of a very long timeline.
    NOT_KEPT = "not kept"


# What begins with a moment. A finished choice is at nothing.
_BEGINS = {
    "queued": Phase.QUEUED,
    "admitted": Phase.PREFILL,
    "chunked": Phase.PREFILL,
    "scheduled": Phase.PREFILL,
    "decoding": Phase.DECODE,
    "preempted": Phase.PREEMPTED,
    "resumed": Phase.PREFILL,
}


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds since the timeline's first entry."""

    phase: Phase
    begin: float
    end: float


def choices_of(timeline: RequestTimeline) -> list[int]:
    """In order."""
    return sorted({entry.choice for entry in timeline.entries})


def spans_of(timeline: RequestTimeline, choice: int) -> list[Span]:
    """A choice's time without gaps, from its first entry to its end or, if it lives, to now; none of them is empty."""
    before, after = _kept(timeline)
    parts = [[entry for entry in part if entry.choice == choice] for part in (before, after)]
    if timeline.num_dropped and parts[0]:
        gap_end = parts[1][0].time if parts[1] else timeline.now
        found = [*_spans(parts[0]), (Phase.NOT_KEPT, parts[0][-1].time, gap_end), *_spans(parts[1], timeline.now)]
    else:
        found = list(_spans(parts[0] + parts[1], timeline.now))
    return [Span(phase, begin, end) for phase, begin, end in found if end > begin]


def seconds_by_phase(spans: list[Span]) -> dict[Phase, float]:
    """Every phase, in order."""
    return {phase: sum(span.end - span.begin for span in spans if span.phase is phase) for phase in Phase}


def _kept(timeline: RequestTimeline) -> tuple[tuple[TimelineEntry, ...], tuple[TimelineEntry, ...]]:
    """The entries before and after those dropped; as many are kept of the beginning as of the end."""
    middle = len(timeline.entries) // 2 if timeline.num_dropped else len(timeline.entries)
    return timeline.entries[:middle], timeline.entries[middle:]


def _spans(entries: list[TimelineEntry], until: float | None = None) -> Iterator[tuple[Phase, float, float]]:
    """until: the end of what the last entry begins; None: unknown."""
    ends = [entry.time for entry in entries[1:]]
    if until is not None:
        ends.append(until)
    for entry, end in zip(entries, ends, strict=False):
        phase = _BEGINS.get(entry.moment)
        if phase is not None:
            yield phase, entry.time, end
