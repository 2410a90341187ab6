"""The share of memory that the message of a call has, from its arrival until it is accepted or refused."""

import contextvars
from collections.abc import Callable

_release: contextvars.ContextVar[Callable[[], None] | None] = contextvars.ContextVar("release", default=None)


def set_release(release: Callable[[], None]) -> None:
    """Sets what `release` calls for the rest of this task."""
    _release.set(release)


def release() -> None:
    """Ends the share of the message of the call that this task answers: it is accepted, or not held any more."""
    end = _release.get()
    if end is not None:
        end()
