"""The routers' Sessions on the step loop's thread: their live groups, the live attempt of each request, and outboxes.

An outbox splits the columns of a step into messages of at most 1 MiB.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from protos import inference_pb2, scheduler_pb2
from runtime.wire import SESSION_MESSAGE_BYTES
from scheduler.core.messages import BlockRemoved, BlockStored, CacheCleared, CacheEvent, FinishReason, SequenceKey
from scheduler.sessions.commands import SubmitGroup
from scheduler.sessions.outgoing import Parcel

_ROUTER_BITS = 38
# The highest group number of a router and the highest Session number of a scheduler: combined they stay below 2**62.
MAX_ROUTER_GROUP = (1 << _ROUTER_BITS) - 1
MAX_SESSION = (1 << 24) - 1


def group_number(session: int, router_group: int) -> int:
    """The core's number of a router's group, unique across Sessions."""
    assert 0 < session <= MAX_SESSION, f"Session {session}: a scheduler numbers them up to {MAX_SESSION}"
    assert 0 <= router_group <= MAX_ROUTER_GROUP, "submissions check it"
    return session << _ROUTER_BITS | router_group


def split_numbers(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 columns of (Sessions, routers' groups) from one of the core's groups."""
    return groups >> _ROUTER_BITS, groups & MAX_ROUTER_GROUP


# Upper bounds of an entry's size in bytes: tags, lengths and varints, of which the group's may have ten bytes.
_SEQUENCE_BYTES, _TOKEN_BYTES, _ENTRY_BYTES, _FINISH_BYTES = 32, 5, 16, 64
# A hash of 32 bytes, with tags and lengths.
_CACHE_EVENT_BYTES = 40
# An item's name of 32 bytes, likewise.
_WANTED_BYTES = 40
# The 16 KiB are for Welcome, Load and the messages' own frames.
_LIMIT_BYTES = SESSION_MESSAGE_BYTES - 16 * 1024
# Maximum length of the text of an error or a rejection.
_MAX_TEXT = 1024

_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.REPETITION: inference_pb2.FINISH_REASON_REPETITION,
    FinishReason.CANCELLED: inference_pb2.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: inference_pb2.FINISH_REASON_ERROR,
}


@dataclass(slots=True, kw_only=True)
class OutputColumns:
    """Tokens of one router's sequences: integer arrays with one entry per sequence, except token_ids.

    num_tokens: None means one each; its sum is the length of token_ids. logprobs: by index into the columns, one
    inference_pb2.TokenLogprobs per token; only for sequences that asked for logprobs.
    """

    groups: np.ndarray
    choices: np.ndarray
    first_tokens: np.ndarray
    num_tokens: np.ndarray | None
    token_ids: np.ndarray
    logprobs: Mapping[int, Sequence[object]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def counts(self) -> np.ndarray:
        """The number of tokens of each sequence."""
        return np.ones(len(self.groups), np.int32) if self.num_tokens is None else self.num_tokens

    def take(self, indexes: np.ndarray) -> "OutputColumns":
        """Returns the entries at these indexes, which must ascend."""
        if self.num_tokens is None:
            num_tokens, token_ids = None, self.token_ids[indexes]
        else:
            is_taken = np.zeros(len(self), np.bool_)
            is_taken[indexes] = True
            num_tokens, token_ids = self.num_tokens[indexes], self.token_ids[is_taken.repeat(self.num_tokens)]
        logprobs: Mapping[int, Sequence[object]] = {}
        if self.logprobs:
            found = {new: self.logprobs.get(old) for new, old in enumerate(indexes.tolist())}
            logprobs = {index: entries for index, entries in found.items() if entries is not None}
        return OutputColumns(
            groups=self.groups[indexes],
            choices=self.choices[indexes],
            first_tokens=self.first_tokens[indexes],
            num_tokens=num_tokens,
            token_ids=token_ids,
            logprobs=logprobs,
        )


class Outbox:
    """Collects entries for one router until `take`. Keeps their order."""

    def __init__(self) -> None:
        self._full: list[scheduler_pb2.SchedulerMessage] = []
        self._begin()

    def _begin(self) -> None:
        self._size = 0
        self._message = scheduler_pb2.SchedulerMessage()
        self._columns: list[OutputColumns] = []

    def add_columns(self, columns: OutputColumns) -> None:
        """Adds the tokens of one step."""
        sizes, num = _SEQUENCE_BYTES + _TOKEN_BYTES * columns.counts, len(columns.groups)
        for index, entries in columns.logprobs.items():
            sizes[index] += sum(_ENTRY_BYTES + _checked(entry).ByteSize() for entry in entries)
        ends = sizes.cumsum()
        start, before = 0, 0
        while start < num:
            # As many entries as the message has room for, but at least one if it is empty.
            end = int(np.searchsorted(ends, before + _LIMIT_BYTES - self._size, "right"))
            end = max(end, start + (not self._size))
            if end > start:
                part = columns if end - start == num else columns.take(np.arange(start, end))
                self._columns.append(part)
                for index in sorted(part.logprobs):
                    self._message.outputs.logprobs.extend(map(_checked, part.logprobs[index]))
                self._size += int(ends[end - 1]) - before
                start, before = end, int(ends[end - 1])
            if start < num:
                self._seal()

    def add_finish(
        self,
        group: int,
        choice: int,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        num_cached_tokens: int = 0,
        message: str = "",
        cancel_reason: scheduler_pb2.CancelReason = scheduler_pb2.CANCEL_REASON_UNSPECIFIED,
        superseded: bool = False,
        no_token: bool = False,
        num_draft_tokens: int = 0,
        num_accepted_tokens: int = 0,
    ) -> None:
        text = message[:_MAX_TEXT]
        self._make_room(_FINISH_BYTES + 4 * len(text))
        self._message.outputs.finishes.add(
            group=group,
            choice=choice,
            reason=_REASONS[reason],
            stop_token_id=stop_token_id,
            num_cached_tokens=num_cached_tokens,
            message=text,
            cancel_reason=cancel_reason,
            superseded=superseded,
            no_token=no_token,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
        )

    def add_prompt_logprobs(self, group: int, choice: int, frame: inference_pb2.PromptLogprobs) -> None:
        self._make_room(_SEQUENCE_BYTES + frame.ByteSize())
        self._message.prompt_logprobs.add(group=group, choice=choice, frame=frame)

    def add_rejected(self, group: int, reason: scheduler_pb2.RejectReason, message: str) -> None:
        text = message[:_MAX_TEXT]
        self._make_room(_ENTRY_BYTES + 4 * len(text))
        self._message.rejected.add(group=group, reason=reason, message=text)

    def add_cache_events(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            self._make_room(_CACHE_EVENT_BYTES)
            added = self._message.cache_events.add()
            match event:
                case BlockStored():
                    added.stored = event.block_hash
                case BlockRemoved():
                    added.removed = event.block_hash
                case CacheCleared():
                    added.cleared.SetInParent()

    def add_wanted_item(self, name: bytes) -> None:
        self._make_room(_WANTED_BYTES)
        self._message.wanted_items.append(name)

    @property
    def is_empty(self) -> bool:
        """True if nothing was added since `take`."""
        return not self._size and not self._full

    def take(
        self, load: scheduler_pb2.Load | None = None, welcome: scheduler_pb2.Welcome | None = None
    ) -> list[Parcel]:
        """Returns all that was added; the first parcel carries `welcome` and `load`. Empty if there is nothing to
        send."""
        if self.is_empty and load is None and welcome is None:
            return []
        if self._size or not self._full:
            self._seal()
        messages, self._full = self._full, []
        if welcome is not None:
            messages[0].welcome.CopyFrom(welcome)
        packed_load = b"" if load is None else scheduler_pb2.SchedulerMessage(load=load).SerializeToString()
        parcels = [Parcel(body=messages[0].SerializeToString(), load=packed_load, has_welcome=welcome is not None)]
        for message in messages[1:]:
            parcels.append(Parcel(body=message.SerializeToString()))
        return parcels

    def _make_room(self, size: int) -> None:
        if self._size and self._size + size > _LIMIT_BYTES:
            self._seal()
        self._size += size

    def _seal(self) -> None:
        for columns in self._columns:
            outputs = self._message.outputs
            outputs.groups.extend(columns.groups.tolist())
            outputs.choices.extend(columns.choices.tolist())
            outputs.first_tokens.extend(columns.first_tokens.tolist())
            outputs.num_tokens.extend(columns.counts.tolist())
            outputs.token_ids.extend(columns.token_ids.tolist())
        self._full.append(self._message)
        self._begin()


def _checked(entry: object) -> inference_pb2.TokenLogprobs:
    """Narrows the type of a logprobs entry, which is opaque to the core."""
    assert isinstance(entry, inference_pb2.TokenLogprobs)
    return entry


@dataclass(slots=True, kw_only=True)
class LiveGroup:
    """A group in the core. number: the core's number for it; router_group: the router's number."""

    number: int
    session: int
    router_group: int
    request_id: str
    attempt: int
    # Choices that have not ended.
    choices: set[int]
    # Prompt logprobs before this position have been sent; position 0 has none.
    next_prompt_position: int = 1
    # Empty if the group is not traced.
    traceparent: str = ""


@dataclass(slots=True, kw_only=True)
class Session:
    """A connected router."""

    number: int
    groups: dict[int, LiveGroup] = field(default_factory=dict)  # by the router's number
    last_group: int = 0
    outbox: Outbox = field(default_factory=Outbox)
    # True once the router has got the Welcome of the current epoch.
    is_welcomed: bool = False


class Sessions:
    """Maps routers' groups to the core's, and back. A group is forgotten when its last choice has ended."""

    def __init__(self) -> None:
        self._sessions: dict[int, Session] = {}
        self._groups: dict[int, LiveGroup] = {}  # by the core's number
        self._attempts: dict[str, LiveGroup] = {}  # the live one of each request_id

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: int) -> bool:
        return session in self._sessions

    def open(self, session: int) -> None:
        self._sessions[session] = Session(number=session)

    def close(self, session: int) -> list[LiveGroup]:
        """Forgets a Session and its groups; returns the groups."""
        found = self._sessions.pop(session, None)
        groups = list(found.groups.values()) if found else []
        for group in groups:
            self._forget(group)
        return groups

    def note_received(self, session: int, router_group: int) -> None:
        """Records that a group was received: the router's Load reports it as last_group."""
        found = self._sessions.get(session)
        if found is not None:
            found.last_group = max(found.last_group, router_group)

    def outbox(self, session: int) -> Outbox:
        return self._sessions[session].outbox

    @property
    def groups(self) -> list[LiveGroup]:
        """All live groups."""
        return list(self._groups.values())

    def live_attempt(self, request_id: str) -> LiveGroup | None:
        return self._attempts.get(request_id)

    def add(self, submit: SubmitGroup) -> LiveGroup | None:
        """Adds a group; None if its Session has ended meanwhile. The request must have no other live attempt."""
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
        """The group with this number of the core's; None if it is not live."""
        return self._groups.get(number)

    def find(self, session: int, router_group: int) -> LiveGroup | None:
        found = self._sessions.get(session)
        return found.groups.get(router_group) if found else None

    def end(self, key: SequenceKey) -> LiveGroup | None:
        """Records the end of a sequence. Returns its group if that has ended as well."""
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
    """The reason to refuse a submission because of a live attempt of the same request; None if it may replace it."""
    if live is None or submit.attempt > live.attempt:
        return None
    what = f"request_id={submit.request.request_id!r}, attempt={submit.attempt}"
    if submit.attempt == live.attempt:
        return scheduler_pb2.REJECT_REASON_DUPLICATE, f"{what}: it is live here; choose another id or a higher attempt"
    return scheduler_pb2.REJECT_REASON_SUPERSEDED, f"{what}: attempt {live.attempt} is live here"
