"""One open Session with a scheduler: submits groups, cancels them, and delivers each message's columns to their
sinks.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from protos.inference_pb2 import SamplingParams, TokenLogprobs
from protos.scheduler_pb2 import (
    CancelReason,
    CancelSequences,
    ItemPart,
    Load,
    PromptPart,
    RouterMessage,
    SchedulerMessage,
    SequenceFinish,
    StepOutputs,
    Submit,
    Welcome,
)
from router.errors import Exhausted
from router.turns import finish_in_slices, run_in_slices
from runtime.media.packed import PackedItem
from runtime.wire import SESSION_MESSAGE_BYTES, SESSION_PART_TOKENS

if TYPE_CHECKING:
    # Streams are above Sessions, which call them.
    from router.streams.placement import Placement
    from router.streams.stream import Stream

# Bytes of an item in one message, with room for its other fields.
_ITEM_PART_BYTES = SESSION_MESSAGE_BYTES - 4096
# Entries of a message's columns, and sequences of a message, that are handled in one go: 0.1 to 0.3 ms.
_ENTRIES_AT_ONCE, _SEQUENCES_AT_ONCE = 128, 32
# A message of more than this is taken in slices: it may hold 100 sequences.
_MOST_AT_ONCE_BYTES = 1024
# Names of items that were sent last: others are sent again, which costs time only.
_MOST_NAMES = 65_536


class SessionError(ValueError):
    """A scheduler's message breaks an invariant of scheduler.proto: its Session ends. The message names the field."""


class _Group:
    """A group, kept even without owner until every choice has ended: its logprobs still take room in the columns.

    Its owner and sink are called on the event loop, and neither block nor raise.
    """

    __slots__ = ("has_logprobs", "items", "live_choices", "on_finish", "owner", "sink")

    def __init__(
        self, owner: "Placement", live_choices: set[int], has_logprobs: bool, items: Sequence[PackedItem]
    ) -> None:
        # Both None once the owner has left.
        self.sink: Stream | None = owner.stream
        self.owner: Placement | None = owner
        # Takes the ends of choices after the owner has left.
        self.on_finish: Callable[[SequenceFinish], None] | None = None
        self.live_choices = live_choices
        self.has_logprobs = has_logprobs
        # Empty once the owner has left: their bytes are the owner's.
        self.items = items


class _Arrived:
    """The part of a message that is about one sequence."""

    __slots__ = ("choice", "finish", "first_token", "group", "logprobs", "token_ids")

    def __init__(
        self,
        group: _Group,
        choice: int,
        first_token: int,
        token_ids: list[int],
        logprobs: Sequence[TokenLogprobs],
        finish: SequenceFinish | None = None,
    ) -> None:
        self.group = group
        self.choice = choice
        self.first_token = first_token
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.finish = finish


@dataclass(frozen=True, slots=True)
class PromptRest:
    """The tokens of a prompt behind its Submit, in parts that are made as they are written: a million takes 50 ms."""

    group: int
    token_ids: Sequence[int]
    begin: int

    def parts(self) -> Iterator[RouterMessage]:
        for start in range(self.begin, len(self.token_ids), SESSION_PART_TOKENS):
            part = PromptPart(group=self.group, prompt_token_ids=self.token_ids[start : start + SESSION_PART_TOKENS])
            yield RouterMessage(prompt_part=part)


class Session:
    """An open Session, from its Welcome on. The replica writes `outgoing` to the wire, in order."""

    def __init__(self, welcome: Welcome) -> None:
        self.welcome = welcome
        self.load = Load(workers_ready=True)
        # An item stands for its ItemParts, which are made one after the other as they are written.
        self.outgoing: asyncio.Queue[RouterMessage | PackedItem | PromptRest] = asyncio.Queue()
        self.closed = False
        self._groups: dict[int, _Group] = {}
        self._last_group = 0
        # Groups submitted and not in a Load yet: group, sequences, prompt tokens.
        self._unreported: deque[tuple[int, int, int]] = deque()
        # Names of items that the scheduler got on this Session, the last ones, and of those that wait to be sent.
        self._sent_items: OrderedDict[bytes, None] = OrderedDict()
        self._waiting_items: set[bytes] = set()

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def num_sequences(self) -> int:
        """Sequences that run or wait in the scheduler, from all routers, with those that we submitted last."""
        return self.load.num_running + self.load.num_waiting + sum(count for _, count, _ in self._unreported)

    @property
    def num_queued_tokens(self) -> int:
        return self.load.num_queued_tokens + sum(tokens for _, _, tokens in self._unreported)

    def refuses(self, priority: int, tenant: str) -> bool:
        """Returns True if the scheduler's queue, or the tenant's share of it, is full, and nothing in it would make way
        for this priority."""
        if tenant in self.load.refused_tenants:
            return priority >= self.load.refused_tenants[tenant]
        return self.load.HasField("refused_priority") and priority >= self.load.refused_priority

    @property
    def owners(self) -> list["Placement"]:
        """Owners of the groups on this Session."""
        return [group.owner for group in self._groups.values() if group.owner is not None]

    def submit(
        self,
        submit: Submit,
        prompt_token_ids: Sequence[int],
        *,
        owner: "Placement",
        items: Sequence[PackedItem] = (),
    ) -> int:
        """Sends a group. submit: without group and prompt, which are filled in here. Returns the group's number.

        owner: its stream gets what is computed. items: those of submit.items; what the scheduler has not got is sent
        before the group.

        Raises Exhausted if the output tokens of a resume alone are more than one message holds.
        """
        assert not self.closed
        submit.group = self._last_group + 1
        submit.num_prompt_tokens = len(prompt_token_ids)
        num_output_tokens = sum(len(start.output_token_ids) for start in submit.choices)
        first_part = max(SESSION_PART_TOKENS - num_output_tokens, 0)
        submit.prompt_token_ids.extend(prompt_token_ids[:first_part])
        if submit.ByteSize() > SESSION_MESSAGE_BYTES - 1024:
            raise Exhausted(
                f"{num_output_tokens} output tokens are too many to move to another replica: resume with fewer choices"
            )
        self._last_group = submit.group
        live = {start.choice for start in submit.choices}
        self._groups[submit.group] = _Group(owner, live, submit.sampling.HasField("logprobs"), items)
        for item in items:
            if item.name in self._sent_items:
                self._sent_items.move_to_end(item.name)
            else:
                self._send_item(item)
        self._unreported.append((submit.group, len(live), len(prompt_token_ids)))
        self.outgoing.put_nowait(RouterMessage(submit=submit))
        if first_part < len(prompt_token_ids):
            self.outgoing.put_nowait(PromptRest(submit.group, prompt_token_ids, first_part))
        return submit.group

    def cancel(self, group: int, choices: Sequence[int], reason: CancelReason) -> None:
        """Cancels choices; none means all. The sink still gets what the scheduler sends of them."""
        if not self.closed and group in self._groups:
            cancel = CancelSequences(group=group, choices=choices, reason=reason)
            self.outgoing.put_nowait(RouterMessage(cancel=cancel))

    def leave(self, group: int, on_finish: Callable[[SequenceFinish], None] | None = None) -> None:
        """Detaches the owner and the sink of a group. on_finish: still takes the ends of its choices."""
        if (left := self._groups.get(group)) is not None:
            left.sink = left.owner = None
            left.items = ()
            left.on_finish = on_finish

    async def next_messages(self) -> Iterator[RouterMessage]:
        """Waits for what is to be written next: one message, or the parts of an item or a prompt."""
        entry = await self.outgoing.get()
        if isinstance(entry, PromptRest):
            return entry.parts()
        if isinstance(entry, PackedItem):
            return self._parts_of(entry)
        return iter((entry,))

    def _parts_of(self, item: PackedItem) -> Iterator[RouterMessage]:
        self._waiting_items.discard(item.name)
        for part in item.parts(_ITEM_PART_BYTES):
            yield RouterMessage(item_part=ItemPart(name=item.name, num_bytes=item.num_bytes, data=part))

    def _send_item(self, item: PackedItem) -> None:
        """Sends an item, unless it is about to be sent anyway."""
        if item.name in self._waiting_items:
            return
        self._waiting_items.add(item.name)
        self._sent_items[item.name] = None
        self._sent_items.move_to_end(item.name)
        if len(self._sent_items) > _MOST_NAMES:
            self._sent_items.popitem(last=False)
        self.outgoing.put_nowait(item)

    def _send_wanted(self, names: Sequence[bytes]) -> None:
        """Sends items again that the scheduler has not got any more. One that no live group has any more is wanted in
        vain: its group is cancelled already."""
        wanted = set(names)
        for group in self._groups.values():
            for item in group.items:
                if item.name in wanted:
                    wanted.discard(item.name)
                    self._send_item(item)
            if not wanted:
                return

    def receive(self, message: SchedulerMessage) -> None:
        """Takes in a message at once. Raises SessionError: the Session is to be ended (`lose`) then."""
        for _ in self._receive(message):
            pass

    async def receive_in_slices(self, message: SchedulerMessage) -> None:
        """Takes in a message, and lets the event loop run in between: a message of 1 MiB has 110,000 tokens, which take
        0.3 s. The next message must wait until this call returns. Raises SessionError, as `receive`."""
        steps = self._receive(message)
        if message.ByteSize() > _MOST_AT_ONCE_BYTES:
            await finish_in_slices(steps)
        else:
            for _ in steps:
                pass

    def _receive(self, message: SchedulerMessage) -> Iterator[None]:
        if message.HasField("welcome"):
            check_welcome(message.welcome)
            self.welcome = message.welcome
        if message.HasField("load"):
            self.load = message.load
            while self._unreported and self._unreported[0][0] <= message.load.last_group:
                self._unreported.popleft()
        if message.wanted_items:
            self._send_wanted(message.wanted_items)
        for rejected in message.rejected:
            group = self._groups.pop(rejected.group, None)
            if group is not None and group.owner is not None:
                group.owner.on_rejected(rejected)
            yield
        for sent in message.prompt_logprobs:
            group = self._groups.get(sent.group)
            if group is not None and group.sink is not None:
                group.sink.on_prompt_logprobs(sent.frame)
            yield
        if message.HasField("outputs"):
            yield from self._receive_outputs(message.outputs)

    def lose(self, cause: str) -> None:
        """Closes the Session, which has ended, and tells the owners of its groups in order.

        Owners may build new messages with all tokens of their streams, 54 ns a token, so this goes on in slices. An
        owner that leaves meanwhile is not told.
        """
        self.closed = True
        run_in_slices(self._tell_owners(cause))

    def _tell_owners(self, cause: str) -> Iterator[None]:
        for number in list(self._groups):
            owner = self._groups.pop(number).owner
            if owner is not None:
                owner.on_lost(cause)
            yield

    def _receive_outputs(self, outputs: StepOutputs) -> Iterator[None]:
        """Passes outputs on; yields where it may be interrupted.

        A message may hold several steps; a sink gets a sequence's tokens of all of them, and its end, in one call,
        which costs about the same for one token and for five. Owners may leave meanwhile: they get nothing more then.
        Raises SessionError before it has passed anything on.
        """
        _check_columns(outputs)
        arrived = yield from self._arrived(outputs)
        for start in range(0, len(arrived), _SEQUENCES_AT_ONCE):
            for each in arrived[start : start + _SEQUENCES_AT_ONCE]:
                group = each.group
                if each.finish is not None:
                    group.live_choices.discard(each.choice)
                if group.sink is not None:
                    group.sink.on_tokens(each.choice, each.first_token, each.token_ids, each.logprobs, each.finish)
                elif each.finish is not None and group.on_finish is not None:
                    group.on_finish(each.finish)
            yield
        for finish in outputs.finishes:
            group = self._groups.get(finish.group)
            if group is not None and not group.live_choices:
                del self._groups[finish.group]

    def _arrived(self, outputs: StepOutputs) -> Generator[None, None, list[_Arrived]]:
        """Returns the outputs by sequence, in the order in which they begin. Raises SessionError."""
        arrived: list[_Arrived] = []
        latest: dict[tuple[int, int], _Arrived] = {}
        # Slicing a list costs half as much as slicing a message's field.
        token_ids, logprobs = outputs.token_ids[:], outputs.logprobs
        token, logprob = 0, 0
        columns = zip(outputs.groups, outputs.choices, outputs.first_tokens, outputs.num_tokens, strict=True)
        for _ in range(0, len(outputs.groups), _ENTRIES_AT_ONCE):
            for number, choice, first_token, count in islice(columns, _ENTRIES_AT_ONCE):
                new_ids = token_ids[token : token + count]
                token += count
                group = self._groups.get(number)
                if group is None:
                    continue
                new_logprobs: Sequence[TokenLogprobs] = ()
                if group.has_logprobs:
                    new_logprobs = logprobs[logprob : logprob + count]
                    logprob += count
                last = latest.get((number, choice))
                if last is not None and last.first_token + len(last.token_ids) == first_token:
                    last.token_ids += new_ids
                    last.logprobs = [*last.logprobs, *new_logprobs]
                else:
                    latest[number, choice] = last = _Arrived(group, choice, first_token, new_ids, new_logprobs)
                    arrived.append(last)
            yield
        if logprob != len(logprobs):
            raise SessionError(f"logprobs has {len(logprobs)} entries where {logprob} tokens asked for them")
        for finish in outputs.finishes:
            last = latest.get((finish.group, finish.choice))
            if last is not None:
                last.finish = finish
            elif (group := self._groups.get(finish.group)) is not None:
                arrived.append(_Arrived(group, finish.choice, 0, [], (), finish))
        return arrived


def for_scheduler(resolved: SamplingParams) -> SamplingParams:
    """Returns the copy for Submit, without stop strings: only the router knows text."""
    sampling = SamplingParams()
    sampling.CopyFrom(resolved)
    del sampling.stop[:]
    return sampling


def check_welcome(welcome: Welcome) -> None:
    """Raises SessionError for a model that can't serve any request."""
    model = welcome.model
    for name, least in (("block_size", 1), ("max_model_len", 2), ("vocab_size", 1)):
        if getattr(model, name) < least:
            raise SessionError(f"welcome.model.{name} is {getattr(model, name)}: it must be at least {least}")


def _check_columns(outputs: StepOutputs) -> None:
    """Raises SessionError."""
    num_entries, num_tokens = len(outputs.groups), outputs.num_tokens
    for name in ("choices", "first_tokens", "num_tokens"):
        if (size := len(getattr(outputs, name))) != num_entries:
            raise SessionError(f"{name} has {size} entries for {num_entries} groups")
    if (total := sum(num_tokens)) != len(outputs.token_ids):
        raise SessionError(f"token_ids has {len(outputs.token_ids)} entries; the sum of num_tokens is {total}")
