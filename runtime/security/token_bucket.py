"""A token bucket, in which rate limits are counted."""

import time
from collections.abc import Callable


class TokenBucket:
    """A token bucket for a rate limit, full at first. clock: seconds, never backwards."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_at = clock()

    @property
    def left(self) -> float:
        """The number of tokens there are; below 0 if more were taken."""
        now = self._clock()
        refill = (now - self._filled_at) * self.per_minute / 60
        self._level, self._filled_at = min(self._level + refill, self.per_minute), now
        return self._level

    @left.setter
    def left(self, level: float) -> None:
        self._level, self._filled_at = min(level, self.per_minute), self._clock()

    @property
    def wait_s(self) -> float:
        """Seconds until at least one token is there; 0: now."""
        return max(1 - self.left, 0.0) * 60 / self.per_minute

    def take(self, amount: int) -> None:
        """Takes tokens, if need be more than there are: the level may be negative."""
        self._level -= amount
