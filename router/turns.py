"""How the event loop is shared: long work runs in slices, and callers pass in turn.

Writers have a queue of their own (router.streams.outbox). Room, such as bytes, is shared by runtime.shares.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator

# A step that is longer than a slice holds the loop alone.
SLICE_S = 0.005


async def finish_in_slices(steps: Iterator[None], clock: Callable[[], float] = time.monotonic) -> None:
    """Runs a generator to its end, as `run_in_slices` does; returns when it has ended. Raises what it raises.

    A cancelled call ends the generator where it is.
    """
    end = clock() + SLICE_S
    for _ in steps:
        if clock() >= end:
            await asyncio.sleep(0)
            end = clock() + SLICE_S


def run_in_slices(steps: Iterator[None], clock: Callable[[], float] = time.monotonic) -> None:
    """Runs a generator to its end: a slice at once, and a slice in each later turn of the loop.

    steps: yields where it may be interrupted. clock: seconds, never backwards.
    """
    end = clock() + SLICE_S
    for _ in steps:
        if clock() >= end:
            asyncio.get_running_loop().call_soon(run_in_slices, steps, clock)
            return


class Turns:
    """Lets a number of tasks pass at once. Those that wait pass one a caller, in turn."""

    def __init__(self, num_at_once: int) -> None:
        self._num_free = num_at_once
        # By caller; the first one is next. Waiting tasks imply that none is free.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    async def take(self, caller: str) -> None:
        """Waits for the task's turn, which `give_back` ends."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        while self._waiting:
            caller = next(iter(self._waiting))
            queue = self._waiting.pop(caller)
            turn = queue.popleft()
            if queue:
                self._waiting[caller] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
