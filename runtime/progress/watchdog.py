"""A thread that judges the loops of its process: while all make progress it says so, if one hangs it ends the process.

A loop's progress is what it has done, not that its thread lives. Time in which the whole process stood still (SIGSTOP,
a frozen container) is not held against a loop. An event loop that goes from callback to callback without coming to the
end of its turn is overloaded, and does not hang: the process that it ended would come back to the same work.

A call that never gives the interpreter's lock back stops this thread, too. The program that started the process then
sees no progress on its page, and kills it.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.awake_time import AwakeTime
from runtime.progress.page import ProgressPage
from runtime.telemetry.lag import stacks
from runtime.telemetry.logs import flush_logs

log = logging.getLogger("octavo.watchdog")

# The exit code of a process that ended itself because it hangs.
EXIT_HUNG = 3
# Prints the stacks of all threads to stderr, even if the interpreter is stuck.
STACKS_SIGNAL = signal.SIGUSR1
_STDERR = 2
# asyncio's, which runs one callback.
_RUN = asyncio.Handle._run.__code__
_INTERVAL_S = 0.5
# /health says so after this part of the time after which the process ends.
_UNWELL = 0.25
_MOST_FRAMES = 60
# An event loop is overloaded after so many seconds in one turn.
_OVERLOADED_S = 1.0
# Writing the log may block, too.
_LAST_WORDS_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stillness:
    """what: a loop that stands still, or a step that does not return, for so many seconds. It hangs after `bound_s`,
    which follows from `option`."""

    what: str
    seconds: float
    bound_s: float
    option: str

    def __str__(self) -> str:
        return f"{self.what} for {self.seconds:.1f} s ({self.option})"


class Progress(Protocol):
    """The progress of a loop, for the watchdog's thread."""

    def stillness(self, now: float, awake: AwakeTime) -> Stillness | None:
        """Returns how long it has made no progress, on time.monotonic(); None if it is not judged now."""
        ...


class LoopProgress:
    """Counts the turns of a loop. Its thread writes `turns`, the watchdog reads them."""

    def __init__(self, name: str, hang_timeout: float, *, is_event_loop: bool = False) -> None:
        """is_event_loop: one of asyncio, on the calling thread."""
        self._name, self._hang_timeout = name, hang_timeout
        self._thread = threading.get_ident() if is_event_loop else 0
        self.turns = 0
        self._seen, self._since = -1, 0.0
        # When the turn began that lasts, and the callback that was seen in it last.
        self._turn_since, self._callback = 0.0, None
        # The turn takes long, but callback follows callback. Other threads may read it.
        self.is_overloaded = False

    def stillness(self, now: float, awake: AwakeTime) -> Stillness:
        if self.turns != self._seen:
            self._seen, self._since, self._turn_since = self.turns, now, now
            self._callback, self.is_overloaded = None, False
        elif self._thread and (callback := _running_callback(self._thread)) is not self._callback:
            self._callback, self._since = callback, now
            self.is_overloaded = awake.seconds(self._turn_since, now) > _OVERLOADED_S
        return Stillness(
            what=f"{self._name} has made no progress",
            seconds=awake.seconds(self._since, now),
            bound_s=self._hang_timeout,
            option=f"hang_timeout={self._hang_timeout:g}",
        )


def _running_callback(thread: int) -> Any:
    """Returns the handle of the callback that asyncio runs on a thread; None between two."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not _RUN:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("self")


class Watchdog(threading.Thread):
    """Judges twice a second, from `start` until `stop`."""

    def __init__(self, *watched: Progress, page: ProgressPage | None) -> None:
        """page: None if no program wants to know of progress."""
        super().__init__(name="watchdog", daemon=True)
        self._watched, self._page = watched, page
        self._event_loop = next((each for each in watched if isinstance(each, LoopProgress)), None)
        self._is_over = threading.Event()
        # What has been standing still for long; empty if nothing has.
        self._complaint = ""

    def start(self) -> None:
        """From now on the process is judged."""
        faulthandler.register(STACKS_SIGNAL, file=_STDERR)
        self._show_progress()
        super().start()

    def stop(self) -> None:
        """Ends and joins the thread. The page's reader may wait no longer than usual for this process to end."""
        self._is_over.set()
        if self.is_alive():
            self.join()

    def is_overloaded(self) -> bool:
        """True while the event loop is overloaded: what nobody has been promised yet is to be given up."""
        return self._event_loop is not None and self._event_loop.is_overloaded

    def health(self, otherwise: Callable[[], tuple[bool, str]]) -> Callable[[], tuple[bool, str]]:
        """The state that /health shows: a loop that stands still; without one, what `otherwise` returns."""
        return lambda: (False, self._complaint) if self._complaint else otherwise()

    def run(self) -> None:
        awake = AwakeTime(_INTERVAL_S)
        while not self._is_over.wait(_INTERVAL_S):
            now = time.monotonic()
            awake.wake(now)
            found = [each for watched in self._watched if (each := watched.stillness(now, awake))]
            for each in found:
                if each.seconds > each.bound_s:
                    end_process(each)
            self._complaint = "; ".join(str(each) for each in found if each.seconds > _UNWELL * each.bound_s)
            self._show_progress()

    def _show_progress(self) -> None:
        if self._page is not None:
            self._page.advance()


def end_process(stillness: Stillness) -> None:
    """Logs why and where all threads are, and ends this process."""
    words = threading.Thread(target=_say_last_words, args=(stillness,), daemon=True)
    words.start()
    words.join(_LAST_WORDS_S)
    os._exit(EXIT_HUNG)


def _say_last_words(stillness: Stillness) -> None:
    log.critical("%s: it hangs, and this process ends. Its threads:", stillness)
    for name, stack in stacks(_MOST_FRAMES):
        log.critical("thread %s: %s", name, stack)
    flush_logs()


@contextlib.contextmanager
def watch_event_loop(hang_timeout: float, *others: Progress) -> Iterator[Watchdog]:
    """Watches the running event loop and others while inside. hang_timeout: seconds."""
    loop, progress = asyncio.get_running_loop(), LoopProgress("event_loop", hang_timeout, is_event_loop=True)

    def turn() -> None:
        nonlocal handle
        progress.turns += 1
        handle = loop.call_later(_INTERVAL_S, turn)

    handle = loop.call_soon(turn)
    watchdog = Watchdog(progress, *others, page=ProgressPage.inherited())
    watchdog.start()
    try:
        yield watchdog
    finally:
        watchdog.stop()
        handle.cancel()
