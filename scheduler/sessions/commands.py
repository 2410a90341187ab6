"""The boundary between the gRPC side and the step loop: commands go in through a mailbox, messages come back to a
listener.
"""

import os
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from protos import inference_pb2, scheduler_pb2
from scheduler.core.messages import GroupRequest, Timeline


class StepLoopListener(Protocol):
    """Called on the step loop's thread; must not block."""

    def deliver(self, batch: list[tuple[int, list[bytes]]]) -> None:
        """Serialized SchedulerMessages, by Session."""
        ...

    def workers_changed(self, model: inference_pb2.ModelInfo | None) -> None:
        """model: what is served; None while the workers are away."""
        ...

    def ended(self, cause: str | None) -> None:
        """The loop is over: None if it was asked to end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """A router is there. `session` numbers are never used twice. watch_cache: it wants cache events."""

    session: int
    watch_cache: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    """It has gone: whatever it submitted is cancelled."""

    session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitGroup:
    """A whole and valid group. router_group is the router's number for it; request.group is the core's, made of
    both (scheduler.sessions.sessions). traceparent: empty if it is not traced."""

    session: int
    router_group: int
    attempt: int
    request: GroupRequest
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseGroup:
    """A group that never got as far as the core."""

    session: int
    router_group: int
    reason: scheduler_pb2.RejectReason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelGroup:
    """choices: empty means all."""

    session: int
    router_group: int
    choices: tuple[int, ...]
    reason: scheduler_pb2.CancelReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EndUnsentChoices:
    """Choices cancelled before their group's prompt was whole: the core has not heard of them."""

    session: int
    router_group: int
    choices: tuple[int, ...]
    reason: scheduler_pb2.CancelReason


@dataclass(frozen=True, slots=True)
class Drain:
    """Takes no more requests; ends when the running ones have, or after drain_timeout."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explain:
    """answer: what the core knows of a request, and the time at which it was asked, on the clock of the entries."""

    request_id: str
    answer: Future[tuple[list[Timeline], float]] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """answer: whether the request was live, on whichever Session."""

    request_id: str
    answer: Future[bool] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetPrefixCache:
    """answer: blocks that could be found before."""

    answer: Future[int] = field(default_factory=Future)


Command = (
    OpenSession
    | CloseSession
    | SubmitGroup
    | RefuseGroup
    | CancelGroup
    | EndUnsentChoices
    | Drain
    | Stop
    | Explain
    | CancelRequest
    | ResetPrefixCache
)


class Mailbox:
    """Commands from one thread for another that polls `fileno()`, which becomes readable when there are some."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._is_closed = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    def put(self, command: Command) -> None:
        if self._is_closed:
            return
        self._commands.append(command)
        os.eventfd_write(self._event, 1)

    def take(self) -> list[Command]:
        """All commands so far, in order; for the polling thread, when the file descriptor is readable."""
        # Before the commands: for one that comes in between, the poll ends once more, and finds nothing.
        os.eventfd_read(self._event)
        commands = []
        while self._commands:
            commands.append(self._commands.popleft())
        return commands

    def close(self) -> None:
        """Drops what is put from now on, for it is not polled any more. On the thread that puts."""
        self._is_closed = True
        os.close(self._event)
