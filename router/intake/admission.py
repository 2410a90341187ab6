"""Rejects overload before any work is done, and estimates when to try again.

Delay = requests in flight / completion rate, by Little's law (Operations Research 9, 1961).
"""

import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Iterator

from router.errors import QueueFull, RouterFull
from router.replicas.replica_set import ReplicaSet

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


class Admission:
    """Counts requests from their first word to their last, and tells those it turns away when to come again."""

    def __init__(self, replicas: ReplicaSet, max_streams: int, retry_delay: RetryDelay | None = None) -> None:
        """max_streams: option of that name."""
        self._replicas = replicas
        self._max_streams = max_streams
        self._retry_delay = retry_delay or RetryDelay()
        self._num_requests = 0

    @contextlib.contextmanager
    def room(self, priority: int) -> Iterator[None]:
        """For one request, as long as it is here. priority: its own.

        Raises RouterFull or QueueFull, at the beginning or from what is done inside, with their retry_after_s.
        """
        try:
            self._check(priority)
            if not self._num_requests:
                self._retry_delay.note_busy()
            self._num_requests += 1
            try:
                yield
                self._retry_delay.note_finished()
            finally:
                self._num_requests -= 1
        except (QueueFull, RouterFull) as error:
            error.retry_after_s = self._retry_delay.seconds(self._num_requests)
            raise

    def _check(self, priority: int) -> None:
        if self._num_requests >= self._max_streams:
            raise RouterFull(
                f"this router holds {self._num_requests} requests already and max_streams={self._max_streams}: try "
                "again later or at another one"
            )
        sessions = [each.session for each in self._replicas.replicas if each.usable and each.session is not None]
        # Without any it is the placement that knows what to say.
        if sessions and all(session.refuses(priority) for session in sessions):
            raise QueueFull(
                "the queue of every replica is full (max_queued_requests, max_queued_tokens): try again later"
            )
