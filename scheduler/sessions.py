"""The routers' Sessions as the step loop knows them: whose groups are live, and which attempt of a request counts."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from protos import scheduler_pb2
from scheduler.commands import SubmitGroup
from scheduler.messages import SequenceKey


@dataclass(slots=True, kw_only=True)
class LiveGroup:
    """A group in the core. number: the core's for it; router_group: the router's."""

    number: int
    session: int
    router_group: int
    request_id: str
    attempt: int
    # Those that have not ended.
    choices: set[int]
    # Prompt logprobs up to here have been sent; none precede position 0.
    next_prompt_position: int = 1
    # Empty: it is not traced.
    traceparent: str = ""


@dataclass(slots=True, kw_only=True)
class _Session:
    groups: dict[int, LiveGroup] = field(default_factory=dict)  # by the router's number
    last_group: int = 0


class Sessions:
    """Maps routers' groups to the core's, and back. A group is forgotten when its last choice has ended."""

    def __init__(self) -> None:
        self._sessions: dict[int, _Session] = {}
        self._groups: dict[int, LiveGroup] = {}  # by the core's number
        self._attempts: dict[str, LiveGroup] = {}  # the live one of each request_id

    def __iter__(self) -> Iterator[int]:
        return iter(self._sessions)

    def __contains__(self, session: int) -> bool:
        return session in self._sessions

    def open(self, session: int) -> None:
        self._sessions[session] = _Session()

    def close(self, session: int) -> list[LiveGroup]:
        """Forgets a Session and its groups, and returns them."""
        found = self._sessions.pop(session, None)
        groups = list(found.groups.values()) if found else []
        for group in groups:
            self._forget(group)
        return groups

    def note_received(self, session: int, router_group: int) -> None:
        """The router's counts include it from now on."""
        found = self._sessions.get(session)
        if found is not None:
            found.last_group = max(found.last_group, router_group)

    def last_group(self, session: int) -> int:
        return self._sessions[session].last_group

    def live_attempt(self, request_id: str) -> LiveGroup | None:
        return self._attempts.get(request_id)

    def add(self, submit: SubmitGroup) -> LiveGroup | None:
        """None if the Session has ended meanwhile. The request has no other live attempt."""
        session = self._sessions.get(submit.session)
        if session is None:
            return None
        request = submit.request
        group = LiveGroup(
            number=request.group,
            session=submit.session,
            router_group=submit.router_group,
            request_id=request.request_id,
            attempt=submit.attempt,
            choices={start.choice for start in request.choices},
            traceparent=submit.traceparent,
        )
        session.groups[submit.router_group] = group
        self._groups[group.number] = self._attempts[group.request_id] = group
        return group

    def get(self, number: int) -> LiveGroup | None:
        """By the core's number."""
        return self._groups.get(number)

    def find(self, session: int, router_group: int) -> LiveGroup | None:
        found = self._sessions.get(session)
        return found.groups.get(router_group) if found else None

    def end(self, key: SequenceKey) -> LiveGroup | None:
        """A sequence has ended. Returns its group if that has, too."""
        group = self._groups[key[0]]
        group.choices.discard(key[1])
        if group.choices:
            return None
        del self._sessions[group.session].groups[group.router_group]
        self._forget(group)
        return group

    def drop(self, group: LiveGroup) -> None:
        """Forgets a group that the core has refused."""
        del self._sessions[group.session].groups[group.router_group]
        self._forget(group)

    def _forget(self, group: LiveGroup) -> None:
        del self._groups[group.number]
        if self._attempts.get(group.request_id) is group:
            del self._attempts[group.request_id]


def why_not_admitted(submit: SubmitGroup, live: LiveGroup | None) -> tuple[scheduler_pb2.RejectReason, str] | None:
    """Whether the live attempt of the same request stands in the way; None if it does not, or has to go."""
    if live is None or submit.attempt > live.attempt:
        return None
    what = f"request_id={submit.request.request_id!r}, attempt={submit.attempt}"
    if submit.attempt == live.attempt:
        return scheduler_pb2.REJECT_REASON_DUPLICATE, f"{what}: it is live here; choose another id or a higher attempt"
    return scheduler_pb2.REJECT_REASON_SUPERSEDED, f"{what}: attempt {live.attempt} is live here"
