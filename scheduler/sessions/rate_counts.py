"""Counts what API keys use at all routers, and tells each router what is left."""

import time
from collections import OrderedDict
from collections.abc import Callable

from protos.scheduler_pb2 import CountRequest, CountResponse, KeyLeft, KeyUse
from runtime.security.token_bucket import TokenBucket

# A router has at most 10,000 keys; beyond this many, the keys that were used longest ago are forgotten.
MAX_KEYS = 20_000
_MOST_NAME_CHARS = 128


class _Buckets:
    """The remainder of one key's limits. None: no limit."""

    def __init__(self, use: KeyUse, clock: Callable[[], float]) -> None:
        """Goes by what the router believes to be left."""
        self.limits = (use.requests_per_minute, use.tokens_per_minute)
        self._requests, self._tokens = (TokenBucket(limit, clock) if limit else None for limit in self.limits)
        if self._requests is not None:
            self._requests.left = use.requests_left
        if self._tokens is not None:
            self._tokens.left = use.tokens_left

    def take(self, use: KeyUse) -> None:
        if self._requests is not None:
            self._requests.take(use.num_requests)
        if self._tokens is not None:
            self._tokens.take(use.num_tokens)

    @property
    def is_full(self) -> bool:
        return all(each is None or each.left >= each.per_minute for each in (self._requests, self._tokens))

    def left(self, key: str) -> KeyLeft:
        requests, tokens = self._requests, self._tokens
        return KeyLeft(
            key=key,
            requests_left=0 if requests is None else requests.left,
            tokens_left=0 if tokens is None else tokens.left,
        )


class RateCounts:
    """The use of all keys at all routers of this scheduler. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Those that are not full.
        self._buckets: OrderedDict[str, _Buckets] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def count(self, request: CountRequest) -> CountResponse:
        for use in request.keys:
            key = use.key[:_MOST_NAME_CHARS]
            found = self._buckets.get(key)
            if found is None or found.limits != (use.requests_per_minute, use.tokens_per_minute):
                # `left` is after what was used.
                self._buckets[key] = _Buckets(use, self._clock)
            else:
                found.take(use)
            if use.num_requests or use.num_tokens:
                self._buckets.move_to_end(key)
        for key in [key for key, buckets in self._buckets.items() if buckets.is_full]:
            del self._buckets[key]
        while len(self._buckets) > MAX_KEYS:
            self._buckets.popitem(last=False)
        return CountResponse(keys=[buckets.left(key) for key, buckets in self._buckets.items()])
