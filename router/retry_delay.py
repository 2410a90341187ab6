"""How long a client that was refused is asked to stay away.

By Little's law (Operations Research 9, 1961) a request stays for as long as those that are here take to finish at the
rate at which they do: so long it takes until another one would find room for sure.
"""

import random
import time
from collections import deque
from collections.abc import Callable

# The rate is that of the last so many seconds, or requests.
_WINDOW_S = 10.0
_MOST_ENDS = 1024
# Bounds of what is asked for, before it is spread out; and what is asked for while nobody knows a rate.
_LEAST_S, _MOST_S, _UNKNOWN_S = 0.2, 30.0, 1.0


class RetryDelay:
    def __init__(
        self, clock: Callable[[], float] = time.monotonic, draw: Callable[[float, float], float] = random.uniform
    ) -> None:
        """clock: seconds, never backwards. draw: a number between two."""
        self._clock, self._draw = clock, draw
        self._busy_since = clock()
        self._ends: deque[float] = deque(maxlen=_MOST_ENDS)

    def note_busy(self) -> None:
        """There is something to do again: what went before says nothing of how fast it will be done."""
        self._busy_since = self._clock()
        self._ends.clear()

    def note_finished(self) -> None:
        """A request has got all it asked for."""
        self._ends.append(self._clock())

    def seconds(self, num_requests: int) -> float:
        """num_requests: that are here. Half to one and a half times of what it takes to finish them: clients that were
        refused together do not come again together."""
        now = self._clock()
        since = max(self._busy_since, now - _WINDOW_S)
        if len(self._ends) == _MOST_ENDS:
            since = max(since, self._ends[0])
        while self._ends and self._ends[0] < since:
            self._ends.popleft()
        expected = num_requests * (now - since) / len(self._ends) if self._ends else _UNKNOWN_S
        return min(max(expected, _LEAST_S), _MOST_S) * self._draw(0.5, 1.5)
