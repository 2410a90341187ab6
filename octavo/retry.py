"""When and where a client calls again, the same for both clients."""

import logging
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import tenacity

from octavo.assembly import Assembly
from octavo.errors import DeadlineExceeded, DuplicateRequest, Overloaded, Unavailable

logger = logging.getLogger("octavo.client")

DEFAULT_TARGET = "localhost:50051"
# Seconds without a message during which a lost call is tried again: a restarted worker is back in about half of it.
DEFAULT_RETRY_FOR = 60.0

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    # Finds a host that went away without a word. The router allows a ping each 10 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC's own backoff, up to 120 s, would make calls fail long after the server is back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


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
    """A timeout from now on; None is none."""

    def __init__(self, timeout: float | None):
        self._timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    def remaining(self) -> float | None:
        """Seconds, for gRPC. Raises DeadlineExceeded."""
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
    """What tenacity needs to know about one request."""

    def __init__(self, targets: Targets, deadline: Deadline, retry_for: float, assembly: Assembly | None = None):
        self._targets = targets
        self._deadline = deadline
        self._retry_for = retry_for
        self._assembly = assembly

    def arguments(self) -> dict[str, Any]:
        """For Retrying or AsyncRetrying. Each use counts its own attempts, so that any progress starts them anew."""
        return {
            "retry": tenacity.retry_if_exception(self._is_worth_retrying),
            "stop": self._must_stop,
            "wait": tenacity.wait_random_exponential(multiplier=0.1, max=2.0),
            "before_sleep": self._go_elsewhere,
            "retry_error_callback": self._give_up,
        }

    def _is_worth_retrying(self, error: BaseException) -> bool:
        if isinstance(error, Unavailable):
            return True
        if self._assembly is None:
            return False
        # The call before this one still counts as live, until its router notices that the connection is gone.
        if isinstance(error, DuplicateRequest):
            return self._assembly.num_calls > 1
        # Of a stream that had begun: it was read too slowly, and goes on where it was.
        return isinstance(error, Overloaded) and self._assembly.started

    def _must_stop(self, state: tenacity.RetryCallState) -> bool:
        if self._deadline.reached_within(state.upcoming_sleep):
            return True
        tried_all = state.attempt_number >= len(self._targets)
        return tried_all and (state.seconds_since_start or 0.0) >= self._retry_for

    def _give_up(self, state: tenacity.RetryCallState) -> NoReturn:
        error = state.outcome.exception() if state.outcome else None
        assert error is not None
        if self._deadline.reached_within(state.upcoming_sleep):
            raise DeadlineExceeded(f"{self._deadline}; the last try failed: {error}") from None
        raise error

    def _go_elsewhere(self, state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        error = state.outcome.exception()
        lost = self._targets.current
        self._targets.advance()
        logger.info(
            "%s: %s; %s at %s",
            lost,
            error,
            "going on" if self._assembly and self._assembly.started else "calling again",
            self._targets.current,
        )
