"""Who calls: what his key allows, and what keeps his requests apart from those of others."""

import contextvars
import hashlib
from dataclasses import dataclass, field

from router.security.rate_limits import RateLimits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Identity:
    """tenant: empty if the router has no keys. least_priority: what asks for less, to run earlier, gets this."""

    tenant: str = ""
    limits: RateLimits = field(default_factory=RateLimits)
    least_priority: int | None = None
    is_admin: bool = False

    def scoped_id(self, request_id: str) -> str:
        """A request's id among those of all tenants. Neither tenants nor ids contain a slash."""
        return f"{self.tenant}/{request_id}" if self.tenant else request_id

    def scoped_salt(self, cache_salt: str) -> str:
        """Equal for equal salts of one tenant only, so that no block of the prefix cache is shared with another."""
        if not self.tenant:
            return cache_salt
        return hashlib.sha256(f"{self.tenant}/{cache_salt}".encode()).hexdigest()

    def priority(self, asked: int) -> int:
        return asked if self.least_priority is None else max(asked, self.least_priority)


# Without keys everybody is the operator.
ANYONE = Identity(is_admin=True)

# Ambient, so that a protocol that comes to the router can't forget to hand it on.
_caller: contextvars.ContextVar[Identity] = contextvars.ContextVar("caller", default=ANYONE)


def caller() -> Identity:
    """Whose call this task answers."""
    return _caller.get()


def set_caller(identity: Identity) -> None:
    """For the rest of this task, and for the tasks that it makes."""
    _caller.set(identity)
