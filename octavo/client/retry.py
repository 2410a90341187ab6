"""Decides when and where both clients retry, and how often they may while servers are overloaded."""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from octavo.client.assembly import Assembly
from octavo.client.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    ItemsNeeded,
    OctavoError,
    Overloaded,
    Unavailable,
)

Result = TypeVar("Result")


class RetryBudget:
    """Limits the retries of one client; all its threads and requests share the budget.

    Each request adds a fifth of a retry. Each retry after a refusal for overload takes a whole one, unless the client
    holds tokens of the request. So retries add at most a fifth to a client's load, however busy the servers are. A
    reserve lets clients with few requests retry, too. After Finagle's RetryBudget (Twitter) and gRPC's retry throttling
    (proposal A6).
    """

    def __init__(self, *, per_request: float = 0.2, reserve: int = 10) -> None:
        """reserve: retries available at first, and the most that are ever saved up."""
        self._per_request, self._reserve = per_request, reserve
        self._level = float(reserve)
        self._lock = threading.Lock()

    def note_request(self) -> None:
        with self._lock:
            self._level = min(self._level + self._per_request, self._reserve)

    def take(self) -> bool:
        """Takes one retry; returns False if none is left."""
        with self._lock:
            if self._level < 1:
                return False
            self._level -= 1
            return True


logger = logging.getLogger("octavo.client")

# Seconds without a message during which a lost call is retried: a restarted worker is back in about half of it.
DEFAULT_RETRY_FOR = 60.0
# A call that has started and lives this long does not count as a failed try.
_STEADY_S = 5.0
# Seconds: the longest wait after a first failure, which doubles with each further one, and the longest of all.
_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 2.0


class Targets:
    """The routers a client knows, used in turn: a call stays with one until it fails."""

    def __init__(self, targets: str | Sequence[str]):
        self.all = (targets,) if isinstance(targets, str) else tuple(targets)
        if not self.all:
            raise ValueError("a client needs at least one target, such as 'localhost:50051'")
        self._index = 0

    def __len__(self) -> int:
        return len(self.all)

    @property
    def current(self) -> str:
        return self.all[self._index]

    def advance(self) -> None:
        self._index = (self._index + 1) % len(self.all)


class Deadline:
    """A timeout that starts now; None: no timeout."""

    def __init__(self, timeout: float | None):
        self._timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    def remaining(self) -> float | None:
        """Seconds left, for gRPC; None: no timeout. Raises DeadlineExceeded."""
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(str(self))
        return left

    def __str__(self) -> str:
        return f"the timeout of {self._timeout:g} s passed"

    def reached_within(self, seconds: float) -> bool:
        return self._end is not None and time.monotonic() + seconds >= self._end


class RetryPolicy:
    """The retry rules of one request."""

    def __init__(
        self,
        targets: Targets,
        deadline: Deadline,
        retry_for: float,
        budget: RetryBudget,
        assembly: Assembly | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        """budget: shared by all requests of the client."""
        self._targets = targets
        self._deadline = deadline
        self._retry_for = retry_for
        self._budget = budget
        self._assembly = assembly
        self._clock = clock
        # When the request stopped making progress, and what had been received by then.
        self._failing_since: float | None = None
        self._num_received = 0
        # When the current call began, and how many calls have been lost: all of them if there is no current call.
        self._call_began = clock()
        self._num_lost = 0
        budget.note_request()

    def run(self, attempt: Callable[[], Result], *, sleep: Callable[[float], object] = time.sleep) -> Result:
        """Calls `attempt` until it returns, and waits between tries.

        Raises the error of a try that is not worth another one, and DeadlineExceeded if the deadline leaves no time for
        one. Each use counts its own tries; progress restarts the clock."""
        number = 0
        while True:
            number += 1
            self._note_call()
            try:
                return attempt()
            except OctavoError as error:
                seconds = self._next_wait(error, number)
            sleep(seconds)

    async def run_async(self, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """The same for the asynchronous client."""
        number = 0
        while True:
            number += 1
            self._note_call()
            try:
                return await attempt()
            except OctavoError as error:
                seconds = self._next_wait(error, number)
            await asyncio.sleep(seconds)

    def _next_wait(self, error: OctavoError, number: int) -> float:
        """Returns the seconds until the next try, and turns to its target. number: of the try that failed, from 1.
        Raises as `run` does."""
        if not self._is_worth_retrying(error):
            raise error
        seconds = self._wait(error, number)
        if self._must_stop(error, number, seconds):
            if self._deadline.reached_within(seconds) and not isinstance(error, Overloaded):
                raise DeadlineExceeded(f"{self._deadline}; the last try failed: {error}") from None
            raise error
        self._go_elsewhere(error)
        return seconds

    def _is_worth_retrying(self, error: OctavoError) -> bool:
        if isinstance(error, ItemsNeeded):
            return self._assembly is not None and self._assembly.bring_items()
        self._note_failure()
        if isinstance(error, Unavailable):
            return True
        has_begun = self._assembly is not None and self._assembly.started
        if isinstance(error, Overloaded):
            # A stream that had begun and was read too slowly can resume, too.
            return error.retry_after_s is not None or has_begun
        # The previous call still counts as live until its router notices that the connection is gone.
        return isinstance(error, DuplicateRequest) and self._assembly is not None and self._assembly.num_calls > 1

    def _note_call(self) -> None:
        # A try that finds a current call only handles its failure.
        if self._assembly is None or self._assembly.num_calls == self._num_lost:
            self._call_began = self._clock()

    def _note_failure(self) -> None:
        now, assembly = self._clock(), self._assembly
        num_received = 0 if assembly is None else assembly.num_received
        # A call that had started and stayed up was not failing while it waited for tokens.
        was_steady = assembly is not None and assembly.is_answered and now - self._call_began >= _STEADY_S
        self._num_lost = 0 if assembly is None else assembly.num_calls
        if self._failing_since is None or num_received != self._num_received or was_steady:
            self._failing_since, self._num_received = now, num_received

    def _wait(self, error: OctavoError, number: int) -> float:
        """Seconds before the next try: at least what an overloaded server asks for, because its schedulers are just as
        busy behind other routers. What an unavailable server asks for counts only if there is no other target."""
        if isinstance(error, ItemsNeeded):
            return 0.0
        # Many tries would overflow a float.
        backoff = random.uniform(0.0, min(_BACKOFF_S * 2.0 ** min(number - 1, 10), _LONGEST_BACKOFF_S))
        asked = error.retry_after_s if isinstance(error, Overloaded | Unavailable) else None
        if asked is None or (isinstance(error, Unavailable) and len(self._targets) > 1):
            return backoff
        return max(backoff, asked * random.uniform(1.0, 1.25))

    def _must_stop(self, error: OctavoError, number: int, wait_s: float) -> bool:
        if self._deadline.reached_within(wait_s):
            return True
        if isinstance(error, ItemsNeeded):
            return False
        assert self._failing_since is not None
        seconds = self._clock() - self._failing_since
        if isinstance(error, Overloaded):
            # Waiting beyond retry_for is pointless. Streams that have started do not draw on the retry budget.
            in_time = seconds + wait_s < self._retry_for
            return not (in_time and (self._num_received or self._budget.take()))
        return number >= len(self._targets) and seconds >= self._retry_for

    def _go_elsewhere(self, error: OctavoError) -> None:
        if isinstance(error, ItemsNeeded):
            # The same router gets them.
            return
        lost = self._targets.current
        self._targets.advance()
        logger.info(
            "%s: %s; %s at %s",
            lost,
            error,
            "going on" if self._assembly and self._assembly.started else "calling again",
            self._targets.current,
        )
