"""Watches an open page under load: memory, nodes, listeners and lateness, sampled once a minute after a collection."""

import time
from dataclasses import dataclass
from statistics import median

from benchmarks.clients.watching.browser import Live, Page
from benchmarks.clients.watching.checks import Checks
from benchmarks.clients.watching.load import loaded

# Streams of 32 tokens with pauses between them take less than half of two cores: what is late is late by the page.
_NUM_STREAMS, _MAX_TOKENS, _PAUSE_S = 4, 32, 2.0
# The views that are looked at in turn, each for so many seconds; figures are taken in the first one.
_VIEWS, _VIEW_S = ("cluster", "requests", "events"), 5.0
# Milliseconds that the latest timers and frames of a page may be later at the end than at the start.
_MOST_LATER_MS = 30.0
# Events that the page keeps, and what it may hold more once it has that many: fifty further ones, and little else.
_FULL = 300
_MOST_GROWTH = Live(heap_bytes=300_000, num_nodes=800, num_listeners=100)
# Collects layout shifts, but for the second after another view was opened.
_WATCH = (
    "window.shifts = {cluster: 0, requests: 0, events: 0}; window.moved = performance.now(); "
    "addEventListener('hashchange', () => { window.moved = performance.now() }); "
    "new PerformanceObserver((list) => list.getEntries().forEach((each) => { "
    "if (!each.hadRecentInput && each.startTime - window.moved > 1000) "
    "window.shifts[location.hash.slice(1)] += each.value })).observe({type: 'layout-shift'}); 0"
)
# How late the latest of 80 timers, and the longest time between two frames, within 4 s.
_LATENESS = (
    "new Promise((resolve) => { let late = 0, gap = 0, left = 80, isOver = false, last = performance.now();"
    "let frame = last;"
    "const next = (now) => { gap = Math.max(gap, now - frame); frame = now; isOver || requestAnimationFrame(next) };"
    "requestAnimationFrame((now) => { frame = now; requestAnimationFrame(next) });"
    "const timer = setInterval(() => { const now = performance.now(); late = Math.max(late, now - last - 50);"
    "last = now; if (!--left) { clearInterval(timer); isOver = true; resolve([late, gap]) } }, 50) })"
)


@dataclass(frozen=True, slots=True)
class Sample:
    """late_ms, gap_ms: the latest timer, and the longest time between two frames."""

    live: Live
    num_events: int
    late_ms: float
    gap_ms: float

    def __str__(self) -> str:
        heap, nodes, listeners = self.live
        return (
            f"heap {heap / 1e6:.2f} MB, {nodes} nodes, {listeners} listeners, {self.num_events} events; "
            f"timers late by {self.late_ms:.0f} ms, "
            f"frames {self.gap_ms:.0f} ms apart, at most"
        )


def stays_small(checks: Checks, minutes: float) -> str:
    """Returns what was seen. Raises AssertionError if the page grows or gets slower."""
    page = checks.page
    page.run(_WATCH)
    with loaded(checks.running, _NUM_STREAMS, max_tokens=_MAX_TOKENS, pause=_PAUSE_S, is_even=True) as load:
        began, samples = time.monotonic(), []
        # At least five, in shorter runs more often than once a minute.
        count = max(round(minutes), 5)
        for number in range(count + 1):
            samples.append(_look(page, began + 60 * minutes * number / count))
            seconds = time.monotonic() - began
            rate = load.num_tokens / seconds
            print(f"{seconds / 60:15.1f} min  {samples[-1]}; {rate:.0f} tok/s so far", flush=True)
    full = next((each for each in samples if each.num_events >= _FULL), None)
    last = samples[-1].live
    shifts = page.run("window.shifts")
    third = len(samples) // 3
    early, late = samples[1 : 1 + third], samples[-third:]
    timers, frames = (
        median(getattr(each, what) for each in late) - median(getattr(each, what) for each in early)
        for what in ("late_ms", "gap_ms")
    )
    shown = (
        f"timers {timers:+.0f} ms, frames {frames:+.0f} ms; {load.num_requests} requests; "
        f"layout shift {', '.join(f'{value:.3f} in {view}' for view, value in shifts.items())}"
    )
    assert full is not None, f"fewer than {_FULL} events, growth can't be told: use more --minutes; {shown}"
    more = Live(*(now - before for now, before in zip(last, full.live, strict=True)))
    heap = f"heap {more.heap_bytes / 1000:+.0f} KB"
    shown = f"since {_FULL} events: {heap}, {more.num_nodes:+d} nodes, {more.num_listeners:+d} listeners; {shown}"
    assert all(each <= most for each, most in zip(more, _MOST_GROWTH, strict=True)), shown
    assert max(timers, frames) <= _MOST_LATER_MS, shown
    assert not load.num_failures, f"{load.num_failures} requests failed; {shown}"
    assert max(shifts.values()) < 0.1, shown
    return shown


def _look(page: Page, at: float) -> Sample:
    """Goes from view to view until the time has come."""
    number = 0
    while (left := at - time.monotonic()) > 0:
        page.run(f"location.hash = {_VIEWS[number % len(_VIEWS)]!r}")
        time.sleep(min(_VIEW_S, left))
        number += 1
    page.run(f"location.hash = {_VIEWS[0]!r}")
    time.sleep(1.5)
    late, gap = page.run(_LATENESS)
    return Sample(page.live(), page.run("document.querySelectorAll('.event-list li').length"), late, gap)
