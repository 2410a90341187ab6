"""The circuit breaker of a replica, and the check that its steps complete.

The breaker is closed, open for a growing time after repeated failures or a stall, then half open.
"""

from collections import deque


class Progress:
    """Checks that a Session's steps complete. Pure: time is an input, in seconds of any clock that only grows."""

    def __init__(self, timeout: float) -> None:
        """timeout: seconds without a step, with something to run, after which it counts as stalled; 0: never."""
        # Stays set until a step completes: having nothing left to run is no sign of health.
        self.is_stalled = False
        self._timeout = timeout
        self._mark: tuple[int, int] | None = None
        self._since = 0.0

    def advance(self, now: float, *, epoch: int, last_step: int) -> bool:
        """Takes in the latest message. epoch: its workers'. Returns True if there was progress since the one before."""
        known, self._mark = self._mark, (epoch, last_step)
        if known == self._mark:
            return False
        self.is_stalled, self._since = False, now
        return known is not None

    def is_overdue(self, now: float, *, has_work: bool) -> bool:
        """Returns True if its next step is overdue, once per timeout."""
        if not has_work:
            self._since = now
        elif self._timeout and now - self._since >= self._timeout:
            self.is_stalled, self._since = True, now
            return True
        return False


# The breaker opens after this many broken Sessions within this time, or this many failed requests in a row.
_MOST_BREAKS, _BREAKS_WITHIN_S = 3, 60.0
_MOST_ERRORS = 5
# Each time it opens for twice as long as before, until it has been closed for _FORGET_S.
_FIRST_OPEN_S, _LONGEST_OPEN_S = 5.0, 600.0
_FORGET_S = 300.0
# A probe without an answer (its client may have gone) makes way for another one.
_PROBE_S = 10.0


class Breaker:
    """Keeps requests from a replica that fails. Closed at first."""

    def __init__(self) -> None:
        # Why it was opened the last time.
        self.cause = ""
        # None: closed. After this time it is half open: one request at a time, until one is answered or fails.
        self._open_until: float | None = None
        self._probed_at: float | None = None
        self._closed_at = 0.0
        self._open_s = 0.0
        self._breaks: deque[float] = deque()
        self._num_errors = 0
        # True if it opened for a stall: a step that completes closes the breaker at once.
        self._is_stalled = False

    # --- What may be sent

    def is_open(self, now: float) -> bool:
        return self._open_until is not None and now < self._open_until

    def allows(self, now: float) -> bool:
        """Returns True if a request may go there; half open, only if no probe is under way."""
        if self._open_until is None:
            return True
        is_probed = self._probed_at is not None and now - self._probed_at < _PROBE_S
        return now >= self._open_until and not is_probed

    def sent(self, now: float) -> None:
        """Notes a request that goes there; half open, it is the probe."""
        if self._open_until is not None and now >= self._open_until:
            self._probed_at = now

    def describe(self, now: float) -> str:
        """Describes its state for people; empty if it is closed."""
        if self._open_until is None:
            return ""
        if now < self._open_until:
            return f"left out for {self._open_until - now:.0f} s more: {self.cause}"
        return f"on probation: {self.cause}"

    # --- What comes of it. The first three return True if this has opened the breaker.

    def broke(self, now: float) -> bool:
        """Counts a Session that broke after it had begun."""
        self._breaks.append(now)
        while now - self._breaks[0] > _BREAKS_WITHIN_S:
            self._breaks.popleft()
        count = len(self._breaks)
        if count >= _MOST_BREAKS or self._open_until is not None:
            return self._open(now, f"Sessions that broke within {_BREAKS_WITHIN_S:g} s: {count}")
        return False

    def failed(self, now: float) -> bool:
        """Counts a request that ended with an error."""
        self._num_errors += 1
        if self._num_errors >= _MOST_ERRORS or self._open_until is not None:
            return self._open(now, f"requests that failed there, in a row: {self._num_errors}")
        return False

    def stalled(self, now: float, seconds: float) -> bool:
        """Notes that it had something to run and completed no step for `seconds`."""
        self._is_stalled = self._open(now, f"no step completed in {seconds:g} s", at_least_s=seconds)
        return self._is_stalled

    def delivered(self, now: float) -> None:
        """Notes that steps complete, or tokens come; this may close the breaker."""
        if self._open_until is not None and (self._is_stalled or now >= self._open_until):
            self._open_until, self._closed_at = None, now
        self._is_stalled = False

    def finished(self, now: float) -> None:
        """Notes that a request ended as it should."""
        self._num_errors = 0
        self.delivered(now)

    def _open(self, now: float, cause: str, *, at_least_s: float = 0.0) -> bool:
        if self.is_open(now):
            return False
        if self._open_until is None and now - self._closed_at > _FORGET_S:
            self._open_s = 0.0
        self._open_s = min(max(2 * self._open_s, _FIRST_OPEN_S, at_least_s), _LONGEST_OPEN_S)
        self._open_until, self._probed_at = now + self._open_s, None
        self._is_stalled = False
        self.cause = cause
        return True
