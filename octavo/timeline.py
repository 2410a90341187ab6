"""Splits a request's time into phases, and draws them as a timeline."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from octavo.client.admin import RequestTimeline, TimelineEntry


class Phase(StrEnum):
    """The phases in which a choice spends its time."""

    QUEUED = "queued"
    # Computing the prompt, or recomputing what a preemption lost.
    PREFILL = "prefill"
    DECODE = "decode"
    # Waiting without blocks, until it resumes.
    PREEMPTED = "preempted"
    # The gap where a very long timeline dropped entries.
    NOT_KEPT = "not kept"


# The phase that each moment begins. `finished` begins none.
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
    """The indices of the choices, in order."""
    return sorted({entry.choice for entry in timeline.entries})


def spans_of(timeline: RequestTimeline, choice: int) -> list[Span]:
    """The spans of a choice, without gaps, from its first entry to its end, or to now if it is live. None is empty."""
    before, after = _kept(timeline)
    parts = [[entry for entry in part if entry.choice == choice] for part in (before, after)]
    if timeline.num_dropped and parts[0]:
        gap_end = parts[1][0].time if parts[1] else timeline.now
        found = [*_spans(parts[0]), (Phase.NOT_KEPT, parts[0][-1].time, gap_end), *_spans(parts[1], timeline.now)]
    else:
        found = list(_spans(parts[0] + parts[1], timeline.now))
    return [Span(phase, begin, end) for phase, begin, end in found if end > begin]


def seconds_by_phase(spans: list[Span]) -> dict[Phase, float]:
    """Seconds in every phase, in the order of Phase."""
    return {phase: sum(span.end - span.begin for span in spans if span.phase is phase) for phase in Phase}


def _kept(timeline: RequestTimeline) -> tuple[tuple[TimelineEntry, ...], tuple[TimelineEntry, ...]]:
    """The entries before and after the dropped ones: a timeline keeps as many at its beginning as at its end."""
    middle = len(timeline.entries) // 2 if timeline.num_dropped else len(timeline.entries)
    return timeline.entries[:middle], timeline.entries[middle:]


def _spans(entries: list[TimelineEntry], until: float | None = None) -> Iterator[tuple[Phase, float, float]]:
    """Yields phase, begin and end. until: when the phase of the last entry ends; None: unknown."""
    ends = [entry.time for entry in entries[1:]]
    if until is not None:
        ends.append(until)
    for entry, end in zip(entries, ends, strict=False):
        phase = _BEGINS.get(entry.moment)
        if phase is not None:
            yield phase, entry.time, end


# Distinct even without colours.
_GLYPHS = {
    Phase.QUEUED: "░",
    Phase.PREFILL: "▒",
    Phase.DECODE: "█",
    Phase.PREEMPTED: "x",
    Phase.NOT_KEPT: "?",
}
_STYLES = {
    Phase.QUEUED: "yellow",
    Phase.PREFILL: "blue",
    Phase.DECODE: "green",
    Phase.PREEMPTED: "red",
    Phase.NOT_KEPT: "dim",
}
_MOMENT_STYLES = {"preempted": "red", "resumed": "yellow", "finished": "green"}
# What num_tokens counts at each moment.
_TOKENS = {
    "queued": "prompt",
    "admitted": "cached",
    "scheduled": "computed",
    "chunked": "computed",
    "preempted": "lost",
    "resumed": "found",
    "finished": "output",
}
_REASONS = {
    "no_blocks": "others needed its KV blocks",
    "workers_lost": "its workers were lost",
    "set_aside": "another request is computed alone",
}
_LONGEST_BAR = 60


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the table: an entry, or consecutive chunks of one choice."""

    entries: list[TimelineEntry]

    @property
    def moment(self) -> str:
        count = len(self.entries)
        return self.entries[0].moment if count == 1 else f"{self.entries[0].moment} {count} times"

    @property
    def tokens(self) -> str:
        what = _TOKENS.get(self.entries[0].moment)
        return f"{sum(entry.num_tokens for entry in self.entries):,} {what}" if what else ""

    @property
    def step(self) -> str:
        first, last = self.entries[0].step, self.entries[-1].step
        if not first:
            return ""
        return str(first) if first == last else f"{first} to {last}"


def draw(timeline: RequestTimeline, console: Console) -> None:
    """Draws one timeline: what happened, and where the time of each choice went."""
    console.print(_title(timeline), highlight=False, soft_wrap=True)
    console.print(_table(timeline))
    console.print(_bars(timeline, console.width))


def _title(timeline: RequestTimeline) -> str:
    end = max((entry.time for entry in timeline.entries), default=0.0) if timeline.finished else timeline.now
    state = "finished after" if timeline.finished else "live for"
    drafts = ""
    if timeline.num_draft_tokens:
        drafts = f"; {timeline.num_accepted_tokens:,} of {timeline.num_draft_tokens:,} draft tokens accepted"
    return f"[bold]request {timeline.request_id}[/] on replica {timeline.replica_id}, {state} {end:.3f} s{drafts}"


def _table(timeline: RequestTimeline) -> Table:
    has_choices = len(choices_of(timeline)) > 1
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("seconds", justify="right")
    if has_choices:
        table.add_column("choice", justify="right")
    table.add_column("what")
    table.add_column("tokens", justify="right")
    table.add_column("step", justify="right")
    table.add_column("reason")
    gap = len(timeline.entries) // 2 if timeline.num_dropped else -1
    for index, row in _rows(timeline, gap):
        if index == gap:
            blank = [""] if has_choices else []
            table.add_row("", *blank, Text(f"{timeline.num_dropped:,} entries not kept", "dim"), "", "", "")
        first = row.entries[0]
        choice = [str(first.choice)] if has_choices else []
        moment = Text(row.moment, _MOMENT_STYLES.get(first.moment, ""))
        table.add_row(
            f"{first.time:.3f}", *choice, moment, row.tokens, row.step, Text(_REASONS.get(first.reason, first.reason))
        )
    return table


def _rows(timeline: RequestTimeline, gap: int) -> Iterator[tuple[int, _Row]]:
    """Yields each row with the index of its first entry. No row spans the gap."""
    start, entries = 0, timeline.entries
    for index in range(1, len(entries) + 1):
        if index < len(entries) and index != gap:
            first, entry = entries[start], entries[index]
            if first.moment == entry.moment == "chunked" and first.choice == entry.choice:
                continue
        yield start, _Row(list(entries[start:index]))
        start = index


def _bars(timeline: RequestTimeline, width: int) -> RenderableType:
    spans = {choice: spans_of(timeline, choice) for choice in choices_of(timeline)}
    seconds = {choice: seconds_by_phase(each) for choice, each in spans.items()}
    phases = [phase for phase in Phase if any(each[phase] for each in seconds.values())]
    if not phases:
        return Text("no time has passed", "dim")
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("choice" if len(spans) > 1 else "", justify="right", header_style="dim")
    for phase in phases:
        table.add_column(Text(f"{_GLYPHS[phase]} {phase}", _STYLES[phase]), justify="right")
    for choice, each in seconds.items():
        name = str(choice) if len(spans) > 1 else "seconds"
        table.add_row(Text(name, "dim"), *(f"{each[phase]:.3f}" for phase in phases))
    end = max(span.end for each in spans.values() for span in each)
    bars = [_bar(each, end, min(width, _LONGEST_BAR)) for each in spans.values()]
    return Group("", *bars, table)


def _bar(spans: list[Span], end: float, width: int) -> Text:
    """A bar of `width` cells of equal time, from 0 to `end`. A span shorter than half a cell may have no cell."""
    bar, filled = Text(no_wrap=True), 0
    for span in spans:
        until = round(span.end / end * width)
        # The time before the choice's first entry is left blank.
        blank = max(round(span.begin / end * width) - filled, 0)
        bar.append(" " * blank)
        bar.append(_GLYPHS[span.phase] * (until - filled - blank), _STYLES[span.phase])
        filled = max(filled, until)
    return bar
