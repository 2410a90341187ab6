"""The boundary between the gRPC side and the step loop: commands in by a mailbox, messages out to a listener."""

import os
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from protos import scheduler_pb2
from scheduler.core.messages import GroupRequest, Timeline
from scheduler.sessions.observation import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """A router has connected. `session` numbers are never reused. watch_cache: the router wants cache events."""

    session: int
    watch_cache: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    """The router has gone: all that it submitted is cancelled."""

    session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitGroup:
    """A complete and valid group. router_group is the router's number for it; request.group is the core's, made of
    Session and router_group (scheduler.sessions.sessions). traceparent: empty if the group is not traced."""

    session: int
    router_group: int
    attempt: int
    request: GroupRequest
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseGroup:
    """A group that is refused before it reaches the core."""

    session: int
    router_group: int
    reason: scheduler_pb2.RejectReason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelGroup:
    """Cancels choices of a group; an empty tuple means all."""

    session: int
    router_group: int
    choices: tuple[int, ...]
    reason: scheduler_pb2.CancelReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EndUnsentChoices:
    """Choices cancelled before their group's prompt was complete: the core does not know them."""

    session: int
    router_group: int
    choices: tuple[int, ...]
    reason: scheduler_pb2.CancelReason


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreItem:
    """An item has come whole, and its name is right. data: serialized ItemData."""

    name: bytes
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseItem:
    """An item is not taken: groups that need it are refused, unless it comes again."""

    name: bytes
    reason: scheduler_pb2.RejectReason
    message: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Takes no more requests; ends when the running ones have ended or drain_timeout has passed."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explain:
    """Asks about a request. answer: its timelines, and the time of the answer, on the clock of their entries."""

    request_id: str
    answer: Future[tuple[list[Timeline], float]] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observe:
    """Asks for a look at the replica."""

    answer: Future[Observation] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """Cancels a request of any Session. answer: the attempt that was live, as in Submit; None if none was."""

    request_id: str
    answer: Future[int | None] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Pauses the replica, or lets it go on. answer: the mode it is in then, once it is paused."""

    mode: scheduler_pb2.PauseMode
    clear_cache: bool = False
    answer: Future[scheduler_pb2.PauseMode] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetPrefixCache:
    """Empties the prefix cache. answer: the number of blocks that could be found before."""

    answer: Future[int] = field(default_factory=Future)


Command = (
    OpenSession
    | CloseSession
    | SubmitGroup
    | RefuseGroup
    | CancelGroup
    | EndUnsentChoices
    | StoreItem
    | RefuseItem
    | Drain
    | Stop
    | Explain
    | Observe
    | CancelRequest
    | Pause
    | ResetPrefixCache
)


class Mailbox:
    """Passes commands from one thread to another, which polls `fileno()`: it is readable while there are some."""

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
        """Returns all commands so far, in order. For the polling thread, when the file descriptor is readable."""
        # Read before taking the commands: one that arrives in between only causes a poll that finds nothing.
        os.eventfd_read(self._event)
        commands = []
        while self._commands:
            commands.append(self._commands.popleft())
        return commands

    def close(self) -> None:
        """Drops all commands from now on, because nothing polls any more. Call it on the thread that puts."""
        self._is_closed = True
        os.close(self._event)
