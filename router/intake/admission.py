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

# The completion rate is measured over the last _WINDOW_S seconds, or fewer if _MOST_ENDS requests end in them.
_WINDOW_S = 10.0
_MOST_ENDS = 1024
# Bounds of the delay before jitter; and the delay while the rate is unknown.
_LEAST_S, _MOST_S, _UNKNOWN_S = 0.2, 30.0, 1.0


class RetryDelay:
    def __init__(
        self, clock: Callable[[], float] = time.monotonic, draw: Callable[[float, float], float] = random.uniform
    ) -> None:
        """clock: seconds, never backwards. draw: a random number between two bounds."""
        self._clock, self._draw = clock, draw
        self._busy_since = clock()
        self._ends: deque[float] = deque(maxlen=_MOST_ENDS)

    def note_busy(self) -> None:
        """Restarts the measurement: requests have come after an idle time, which must not lower the rate."""
        self._busy_since = self._clock()
        self._ends.clear()

    def note_finished(self) -> None:
        """Counts a request that has got all it asked for."""
        self._ends.append(self._clock())

    def seconds(self, num_requests: int) -> float:
        """Returns 0.5 to 1.5 times what the requests in flight take to finish, so that clients refused together do not
        come back together. num_requests: those in flight."""
        now = self._clock()
        since = max(self._busy_since, now - _WINDOW_S)
        if len(self._ends) == _MOST_ENDS:
            since = max(since, self._ends[0])
        while self._ends and self._ends[0] < since:
            self._ends.popleft()
        expected = num_requests * (now - since) / len(self._ends) if self._ends else _UNKNOWN_S
        return min(max(expected, _LEAST_S), _MOST_S) * self._draw(0.5, 1.5)


class Admission:
    """Counts requests from arrival to end, and tells those it refuses when to try again."""

    def __init__(self, replicas: ReplicaSet, max_streams: int, retry_delay: RetryDelay | None = None) -> None:
        """max_streams: option of that name."""
        self._replicas = replicas
        self._max_streams = max_streams
        self._retry_delay = retry_delay or RetryDelay()
        self._num_requests = 0

    @contextlib.contextmanager
    def room(self, priority: int | None) -> Iterator[None]:
        """Counts one request while inside. priority: the request's; None: no replica computes it, as for Tokenize.

        Raises RouterFull or QueueFull, on entry or from the body, with retry_after_s set.
        """
        try:
            self._check(priority)
            if not self._num_requests:
                self._retry_delay.note_busy()
            self._num_requests += 1
            try:
                yield
                if priority is not None:
                    self._retry_delay.note_finished()
            finally:
                self._num_requests -= 1
        except (QueueFull, RouterFull) as error:
            error.retry_after_s = self._retry_delay.seconds(self._num_requests)
            raise

    def _check(self, priority: int | None) -> None:
        if self._num_requests >= self._max_streams:
            raise RouterFull(
                f"this router holds {self._num_requests} requests already and max_streams={self._max_streams}: try "
                "again later or at another one"
            )
        if priority is None:
            return
        sessions = [each.session for each in self._replicas.replicas if each.usable and each.session is not None]
        # Without a Session the dispatcher raises NoReplica, which says why.
        if sessions and all(session.refuses(priority) for session in sessions):
            raise QueueFull(
                "the queue of every replica is full (max_queued_requests, max_queued_tokens): try again later"
            )
