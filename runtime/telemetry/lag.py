"""Measures how long a thread does not serve its queue, and logs the stack that held it for more than 100 ms.

An event loop is asked by a timer, a thread that polls says itself when it works and when it waits. A sampling thread
looks at both 20 times a second and logs the stack of one that is held. Together they take 0.4% of a core.
"""

import asyncio
import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram

log = logging.getLogger("octavo.lag")

_TICK_S = 0.05
# Stacks of threads that are held for longer are logged, at most one each 10 s.
_HELD_S = 0.1
_LOG_EVERY_S = 10.0
_MOST_FRAMES = 12
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


def lag_histogram(registry: CollectorRegistry) -> Histogram:
    return Histogram(
        "octavo_event_loop_lag_seconds",
        "How long a thread leaves its queue alone: how late an event loop's timer is (event_loop), how long an "
        "iteration works (step_loop).",
        ["thread"],
        buckets=_BUCKETS,
        registry=registry,
    )


class WatchedThread:
    """A thread with a queue. It calls `begin` first, then `work` and `rest` in turn."""

    def __init__(self, name: str, histogram: Histogram) -> None:
        self.name = name
        # Read by the sampling thread: the thread's identifier, and when it left its queue; infinity: it waits there.
        self.ident = 0
        self.since = math.inf
        self._observe = histogram.labels(name).observe

    def begin(self) -> None:
        self.ident = threading.get_ident()

    def work(self, now: float) -> None:
        """now: on time.monotonic(), as all times here."""
        self.since = now

    def rest(self, now: float) -> None:
        self._observe(now - self.since)
        self.since = math.inf


class _Ticker:
    """Asks an event loop by a timer. The loop is held if the timer is late."""

    def __init__(self, histogram: Histogram) -> None:
        self.watched = WatchedThread("event_loop", histogram)
        self.watched.begin()
        self._loop = asyncio.get_running_loop()
        self._handle = self._next()

    def stop(self) -> None:
        self._handle.cancel()
        self.watched.since = math.inf

    def _tick(self) -> None:
        self.watched.rest(max(time.monotonic(), self.watched.since))
        self._handle = self._next()

    def _next(self) -> asyncio.TimerHandle:
        self.watched.work(time.monotonic() + _TICK_S)
        return self._loop.call_later(_TICK_S, self._tick)


class _Sampler(threading.Thread):
    def __init__(self, watched: Sequence[WatchedThread]) -> None:
        super().__init__(name="lag", daemon=True)
        self._watched = watched
        self._is_over = threading.Event()
        self._next_log = dict.fromkeys([None, *watched], 0.0)
        # The stretch of each that was logged last.
        self._logged = dict.fromkeys(watched, 0.0)

    def stop(self) -> None:
        self._is_over.set()
        self.join()

    def run(self) -> None:
        last, last_cpu = time.monotonic(), time.process_time()
        while not self._is_over.wait(_TICK_S):
            now, cpu = time.monotonic(), time.process_time()
            late = now - last - _TICK_S
            held = [each for each in self._watched if now - each.since > _HELD_S]
            if late > _HELD_S:
                # No thread of Python ran, so none can be blamed by its own stack alone.
                self._log_all(now, late, cpu - last_cpu)
            else:
                for each in held:
                    self._log_one(each, now)
            last, last_cpu = now, cpu

    def _log_one(self, watched: WatchedThread, now: float) -> None:
        since = watched.since
        stack = _stack(watched.ident, _MOST_FRAMES)
        # Not if it has gone on meanwhile: the stack would be of something else.
        if since == watched.since != self._logged[watched] and self._may_log(watched, now):
            self._logged[watched] = since
            log.warning("%s has been held for %.0f ms by %s", watched.name, 1000 * (now - since), stack)

    def _log_all(self, now: float, seconds: float, cpu_seconds: float) -> None:
        if not self._may_log(None, now):
            return
        places = [f"{name}: {stack}" for name, stack in stacks(1)]
        log.warning(
            "no thread could run for %.0f ms, in which the process had %.0f ms of CPU time: a call held the "
            "interpreter's lock, or the machine was busy or stood still; the threads are now at %s",
            1000 * seconds,
            1000 * cpu_seconds,
            ", ".join(places),
        )

    def _may_log(self, what: WatchedThread | None, now: float) -> bool:
        if now < self._next_log[what]:
            return False
        self._next_log[what] = now + _LOG_EVERY_S
        return True


def stacks(most_frames: int) -> list[tuple[str, str]]:
    """The name and the innermost frames of each thread but the calling one."""
    caller = threading.current_thread()
    return [
        (thread.name, _stack(thread.ident or 0, most_frames))
        for thread in threading.enumerate()
        if thread is not caller
    ]


def _stack(ident: int, most_frames: int) -> str:
    """The innermost frames of a thread in one line, the innermost one first."""
    frame, places = sys._current_frames().get(ident), list[str]()
    while frame is not None and len(places) < most_frames:
        code = frame.f_code
        folder, _, file = code.co_filename.rpartition("/")
        places.append(f"{code.co_name} ({folder.rpartition('/')[2]}/{file}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(places)


@contextlib.contextmanager
def watch_lag(histogram: Histogram, *others: WatchedThread) -> Iterator[None]:
    """Watches the running event loop and other threads while inside."""
    ticker = _Ticker(histogram)
    sampler = _Sampler([ticker.watched, *others])
    sampler.start()
    try:
        yield
    finally:
        ticker.stop()
        sampler.stop()
