"""How often a key may be used: token buckets that refill evenly.

Tokens are known when they have been computed, so their bucket may be overdrawn, and then has to refill before the next
request; packages for rate limits know no debt.
"""

import math
import time
from collections.abc import Callable

from router.errors import RateLimited


class TokenBucket:
    """Full at first. clock: seconds, never backwards."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_at = clock()

    @property
    def wait_s(self) -> float:
        """Seconds until there is one to take."""
        now = self._clock()
        refill = (now - self._filled_at) * self.per_minute / 60
        self._level, self._filled_at = min(self._level + refill, self.per_minute), now
        return max(1 - self._level, 0.0) * 60 / self.per_minute

    def take(self, amount: int) -> None:
        """Also what is not there."""
        self._level -= amount


class RateLimits:
    """Of one key; None: no limit."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = None if requests_per_minute is None else TokenBucket(requests_per_minute, clock)
        self._tokens = None if tokens_per_minute is None else TokenBucket(tokens_per_minute, clock)

    def begin_request(self) -> None:
        """Counts one. Raises RateLimited, and then counts nothing."""
        for unit, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None and (wait_s := bucket.wait_s) > 0:
                raise RateLimited(
                    f"this API key's {unit}_per_minute={bucket.per_minute} are used up: try again in "
                    f"{math.ceil(wait_s)} s",
                    retry_after_s=wait_s,
                )
        if self._requests is not None:
            self._requests.take(1)

    def spend_tokens(self, count: int) -> None:
        """Of a prompt, or of an output."""
        if self._tokens is not None:
            self._tokens.take(count)
