"""How many requests a router holds at once, and whom it refuses before it has spent anything on him."""

import contextlib
from collections.abc import Iterator

from router.errors import QueueFull, RouterFull
from router.replicas import ReplicaSet
from router.retry_delay import RetryDelay


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
