"""Measures how long a peer has been silent, without the time in which this process itself stood still."""

from collections import deque

# A wake-up that is later than this is a stall; shorter delays are the normal work of a loop.
_STALL_S = 0.1
# Stalls remembered. More than these within one wait only let the wait appear longer.
_MAX_STALLS = 256


class AwakeTime:
    """Counts seconds in which a loop was awake to read its messages.

    A process that was stopped (SIGSTOP, a frozen container, a callback that takes long) finds its timers expired and
    its peers' messages unread. It must not take its own absence for their silence. Times are monotonic seconds.
    """

    def __init__(self, interval: float) -> None:
        """interval: the loop calls `wake` at least this often."""
        self._interval = interval
        self._last_wake: float | None = None
        # Begin and end of each stall, in order.
        self._stalls: deque[tuple[float, float]] = deque(maxlen=_MAX_STALLS)
        # Length of all stalls so far, in seconds.
        self.stalled_s = 0.0

    def wake(self, now: float) -> None:
        """Notes that the loop is awake. A call more than 0.1 s late means that it stood still."""
        if self._last_wake is not None and now - self._last_wake > self._interval + _STALL_S:
            self._stalls.append((self._last_wake + self._interval, now))
            self.stalled_s += now - self._last_wake - self._interval
        self._last_wake = now

    def seconds(self, since: float, now: float) -> float:
        """Seconds from `since` to `now`, without stalls. Call `wake` first."""
        awake = now - since
        for began, ended in reversed(self._stalls):
            if ended <= since:
                break
            awake -= max(0.0, min(ended, now) - max(began, since))
        return awake
