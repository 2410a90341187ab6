"""runtime.progress.watchdog: an event loop that goes from callback to callback is overloaded, one that stands still
hangs. The watchdog's thread is played by the test, so that no real time counts."""

import asyncio
import threading
from collections.abc import Callable

from runtime.awake_time import AwakeTime
from runtime.progress import watchdog
from runtime.progress.watchdog import LoopProgress

HANG_S = 10.0


class _Turn:
    """A turn of an event loop whose callbacks stop where the test looks at them."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Semaphore(0), threading.Semaphore(0)
        self.progress: LoopProgress | None = None
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        self.progress = LoopProgress("event_loop", HANG_S, is_event_loop=True)
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def held() -> None:
            # Deeper frames do not hide the callback.
            def wait() -> None:
                self.reached.release()
                assert self.released.acquire(timeout=30)

            wait()

        for _ in range(3):
            loop.call_soon(held)
        loop.call_soon(done.set)
        await done.wait()

    def next(self) -> None:
        self.released.release()
        assert self.reached.acquire(timeout=30)


def _in_a_turn(look: Callable[[_Turn], None]) -> None:
    turn = _Turn()
    turn.thread.start()
    assert turn.reached.acquire(timeout=30)
    try:
        look(turn)
    finally:
        for _ in range(3):
            turn.released.release()
        turn.thread.join(30)


def test_callback_after_callback_is_overload_and_one_that_stays_is_a_hang() -> None:
    def look(turn: _Turn) -> None:
        progress, awake = turn.progress, AwakeTime(1000.0)
        assert progress is not None
        assert progress.stillness(0.0, awake).seconds == 0.0
        assert not progress.is_overloaded
        progress.stillness(0.5, awake)
        turn.next()
        # Three times as long as a hang may last, but the callback is another one.
        assert progress.stillness(3 * HANG_S, awake).seconds == 0.0
        assert progress.is_overloaded
        turn.next()
        assert progress.stillness(6 * HANG_S, awake).seconds == 0.0
        # This one stays.
        assert progress.stillness(6 * HANG_S + 4, awake).seconds == 4.0
        assert progress.stillness(7 * HANG_S + 1, awake).seconds == HANG_S + 1
        progress.turns += 1
        assert progress.stillness(8 * HANG_S, awake).seconds == 0.0
        assert not progress.is_overloaded

    _in_a_turn(look)


def test_a_short_turn_is_no_overload() -> None:
    def look(turn: _Turn) -> None:
        progress, awake = turn.progress, AwakeTime(1000.0)
        assert progress is not None
        progress.stillness(0.0, awake)
        progress.stillness(0.5 * watchdog._OVERLOADED_S, awake)
        turn.next()
        progress.stillness(0.9 * watchdog._OVERLOADED_S, awake)
        assert not progress.is_overloaded

    _in_a_turn(look)


def test_loops_that_are_not_asyncios_hang_by_their_turns_alone() -> None:
    progress, awake = LoopProgress("step_loop", HANG_S), AwakeTime(1000.0)
    progress.stillness(0.0, awake)
    assert progress.stillness(HANG_S + 1, awake).seconds == HANG_S + 1
