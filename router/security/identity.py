"""The identity behind a call: its tenant, its rate limits, and what keeps its requests apart from other tenants'."""

import contextvars
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from protos.scheduler_pb2 import KeyLeft, KeyUse
from router.errors import RateLimited
from runtime.security.token_bucket import TokenBucket


class RateLimits:
    """The limits of one key, None for none, as this process knows them; a scheduler counts what all processes use."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = None if requests_per_minute is None else TokenBucket(requests_per_minute, clock)
        self._tokens = None if tokens_per_minute is None else TokenBucket(tokens_per_minute, clock)
        # Used here, and not counted by a scheduler yet.
        self._num_requests, self._num_tokens = 0, 0

    def begin_request(self) -> None:
        """Counts one request. Raises RateLimited, and counts nothing then."""
        for unit, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None and (wait_s := bucket.wait_s) > 0:
                raise RateLimited(
                    f"this API key's {unit}_per_minute={bucket.per_minute} are used up: try again in "
                    f"{math.ceil(wait_s)} s",
                    retry_after_s=wait_s,
                )
        if self._requests is not None:
            self._requests.take(1)
            self._num_requests += 1

    def spend_tokens(self, count: int) -> None:
        """Counts tokens of a prompt or an output."""
        if self._tokens is not None:
            self._tokens.take(count)
            self._num_tokens += count

    @property
    def are_any(self) -> bool:
        return self._requests is not None or self._tokens is not None

    @property
    def are_used(self) -> bool:
        """True if a scheduler has something to count, or would have to know what is left if it had just started."""
        if self._num_requests or self._num_tokens:
            return True
        return any(each is not None and each.left < each.per_minute for each in (self._requests, self._tokens))

    def take_use(self, key: str) -> KeyUse:
        """Returns what was used since the last call, for a scheduler to count. key: names the key."""
        requests, tokens = self._requests, self._tokens
        use = KeyUse(
            key=key,
            requests_per_minute=0 if requests is None else requests.per_minute,
            tokens_per_minute=0 if tokens is None else tokens.per_minute,
            num_requests=self._num_requests,
            num_tokens=self._num_tokens,
            requests_left=0 if requests is None else requests.left,
            tokens_left=0 if tokens is None else tokens.left,
        )
        self._num_requests = self._num_tokens = 0
        return use

    def give_back(self, use: KeyUse) -> None:
        """Takes back what could not be counted."""
        self._num_requests += use.num_requests
        self._num_tokens += use.num_tokens

    def set_left(self, left: KeyLeft) -> None:
        """Takes over what is left after what all routers have used; what was used here since then counts, too."""
        if self._requests is not None:
            self._requests.left = left.requests_left - self._num_requests
        if self._tokens is not None:
            self._tokens.left = left.tokens_left - self._num_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Identity:
    """Identity of a caller. tenant: empty if the router has no keys. key_digest: the key's name, in hexadecimal digits.

    least_priority: a request that asks for a lower value, to run earlier, gets this one; None: no limit. max_streams:
    requests of this key that may be live at once; None: the router's default. weight: the tenant's share of what is
    scarce, relative to other tenants'.
    """

    tenant: str = ""
    key_digest: str = ""
    limits: RateLimits = field(default_factory=RateLimits)
    least_priority: int | None = None
    max_streams: int | None = None
    weight: float = 1.0
    is_admin: bool = False

    def scoped_id(self, request_id: str) -> str:
        """Returns an id that is unique over all tenants. Neither tenants nor ids contain a slash."""
        return f"{self.tenant}/{request_id}" if self.tenant else request_id

    def named_id(self, name: str) -> str:
        """Returns the id, unique over all tenants, of the request that an operator names: an admin may name that of
        another tenant, as TENANT/ID."""
        return name if self.is_admin and "/" in name else self.scoped_id(name)

    def scoped_salt(self, cache_salt: str) -> str:
        """Returns a salt that no other tenant can have, so that tenants share no block of the prefix cache."""
        if not self.tenant:
            return cache_salt
        return hashlib.sha256(f"{self.tenant}/{cache_salt}".encode()).hexdigest()

    def priority(self, asked: int) -> int:
        return asked if self.least_priority is None else max(asked, self.least_priority)


# Without keys every caller counts as the operator.
ANYONE = Identity(is_admin=True)

# A context variable, so that no protocol can forget to pass it on.
_caller: contextvars.ContextVar[Identity] = contextvars.ContextVar("caller", default=ANYONE)


def caller() -> Identity:
    """The identity behind the call that this task answers."""
    return _caller.get()


def set_caller(identity: Identity) -> None:
    """Sets the caller for the rest of this task, and for the tasks that it creates."""
    _caller.set(identity)


# The connection that a call came on, for routers without keys.
_connection: contextvars.ContextVar[str] = contextvars.ContextVar("connection", default="")


def set_connection(address: str) -> None:
    """Sets the connection of the call that this task answers. address: the other end's."""
    _connection.set(address)


def caller_share() -> str:
    """Returns the name under which a call shares what is scarce with others: its tenant, or its connection if the
    router has no keys."""
    return caller().tenant or _connection.get()
