"""Rejects overload before any work is done, and estimates when to try again.

Delay = requests in flight / completion rate, by Little's law (Operations Research 9, 1961).
"""

import contextlib
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

from router.errors import InvalidRequest, KeyFull, QueueFull, RouterFull
from router.replicas.replica_set import ReplicaSet
from router.security.identity import Identity
from runtime.shares import SharedRoom

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

    def __init__(
        self,
        replicas: ReplicaSet,
        max_streams: int,
        max_streams_per_key: int = 0,
        retry_delay: RetryDelay | None = None,
    ) -> None:
        """max_streams, max_streams_per_key: options of these names."""
        self._replicas = replicas
        self._max_streams_per_key = max_streams_per_key
        self._retry_delay = retry_delay or RetryDelay()
        # Requests by tenant, and by key.
        self._requests = SharedRoom(max_streams)
        self._num_by_key: Counter[str] = Counter()

    @contextlib.contextmanager
    def room(self, identity: Identity, priority: int | None, num_streams: int = 1) -> Iterator[None]:
        """Counts one request while inside. priority: the request's; None: no replica computes it, as for Tokenize.
        num_streams: for how many streams it counts.

        Raises KeyFull, RouterFull or QueueFull, on entry or from the body, with retry_after_s set, and InvalidRequest
        if there is never that much room.
        """
        tenant, key, weight = identity.tenant, identity.key_digest, identity.weight
        try:
            self._check(identity, priority, num_streams)
            if not self._requests.total:
                self._retry_delay.note_busy()
            # Without keys all callers are one, which may take everything.
            if not self._requests.take(tenant, num_streams, weight if tenant else math.inf):
                raise self._full(tenant)
            self._num_by_key[key] += num_streams
            try:
                yield
                if priority is not None:
                    self._retry_delay.note_finished()
            finally:
                self._requests.give_back(tenant, num_streams)
                self._num_by_key[key] -= num_streams
                if not self._num_by_key[key]:
                    del self._num_by_key[key]
        except KeyFull as error:
            error.retry_after_s = self._retry_delay.seconds(self._num_by_key[key])
            raise
        except (QueueFull, RouterFull) as error:
            error.retry_after_s = self._retry_delay.seconds(self._requests.total)
            raise

    def _full(self, tenant: str) -> RouterFull:
        total, max_streams = self._requests.total, self._requests.size
        if total >= max_streams or not tenant:
            words = f"this router holds {total} requests already and max_streams={max_streams}"
        else:
            words = (
                f"this router holds {total} requests, {self._requests.of(tenant)} of them from this tenant, which may "
                f"have as many as are free of max_streams={max_streams}, times its weight"
            )
        return RouterFull(f"{words}: try again later or at another one")

    def _check(self, identity: Identity, priority: int | None, num_streams: int) -> None:
        most = (self._max_streams_per_key if identity.max_streams is None else identity.max_streams) or math.inf
        if not identity.key_digest:
            most = math.inf
        if num_streams > min(most, self._requests.size):
            raise InvalidRequest(
                f"beam_search.width={num_streams}: a search counts as so many streams, and "
                f"max_streams={min(most, self._requests.size)}"
            )
        if self._num_by_key[identity.key_digest] + num_streams > most:
            raise KeyFull(
                f"this API key has {self._num_by_key[identity.key_digest]} requests here already and "
                f"max_streams={most}: wait until one has ended"
            )
        if priority is None:
            return
        sessions = [each.session for each in self._replicas.replicas if each.usable and each.session is not None]
        # Without a Session the dispatcher raises NoReplica, which says why.
        if sessions and all(session.refuses(priority, identity.tenant) for session in sessions):
            whose = f", or the share of tenant {identity.tenant} in it," if identity.tenant else ""
            raise QueueFull(
                f"the queue of every replica{whose} is full (max_queued_requests, max_queued_tokens): try again later"
            )
