"""How a Session handles a scheduler's messages."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from protos.inference_pb2 import (
    FINISH_REASON_LENGTH,
    ITEM_KIND_IMAGE,
    ItemOptions,
    ModelInfo,
    PromptLogprobs,
    TokenLogprobs,
)
from protos.scheduler_pb2 import (
    Rejected,
    SchedulerMessage,
    SequenceFinish,
    SequenceStart,
    StepOutputs,
    Submit,
    Welcome,
)
from router.replicas.session import Session, SessionError
from router.streams.placement import Placement
from router.turns import SLICE_S
from runtime.media.names import item_name
from runtime.media.packed import PackedItem
from runtime.wire import SESSION_MESSAGE_BYTES


class Owner(Placement):
    """Owns a group, and takes what is computed for it, which a router's owner leaves to its stream."""

    def __init__(self) -> None:
        self.stream: Any = self
        # The tokens of each choice, in the order in which they came.
        self.token_ids: dict[int, list[int]] = {}
        self.ended: set[int] = set()

    def on_tokens(
        self,
        choice: int,
        first_token: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        ended: SequenceFinish | None,
    ) -> None:
        assert choice not in self.ended, "tokens after the end"
        known = self.token_ids.setdefault(choice, [])
        assert first_token == len(known)
        known += token_ids
        if ended is not None:
            self.ended.add(choice)

    def on_prompt_logprobs(self, frame: PromptLogprobs) -> None:
        raise AssertionError

    def on_rejected(self, rejected: Rejected) -> None:
        raise AssertionError

    def on_lost(self, cause: str) -> None:
        raise AssertionError


def test_an_end_comes_after_all_tokens_of_a_message_that_holds_two_steps() -> None:
    """The scheduler may read several results together; their tokens then go out in one message."""
    session, owner = Session(Welcome()), Owner()
    submit = Submit(choices=[SequenceStart(choice=0), SequenceStart(choice=1)])
    group = session.submit(submit, [1, 2], owner=owner)
    finishes = [SequenceFinish(group=group, choice=choice, reason=FINISH_REASON_LENGTH) for choice in (0, 1)]
    outputs = StepOutputs(
        groups=[group] * 3,
        choices=[0, 1, 0],
        first_tokens=[0, 0, 1],
        num_tokens=[1, 2, 1],
        token_ids=[10, 20, 21, 11],
        finishes=finishes,
    )
    session.receive(SchedulerMessage(outputs=outputs))
    assert owner.token_ids == {0: [10, 11], 1: [20, 21]}
    assert owner.ended == {0, 1}
    assert session.num_groups == 0


def test_steps_of_one_message_reach_an_owner_together_unless_something_is_missing_between_them() -> None:
    calls: list[tuple[int, int, list[int]]] = []

    class Recorder(Owner):
        def on_tokens(
            self,
            choice: int,
            first_token: int,
            token_ids: Sequence[int],
            logprobs: Sequence[TokenLogprobs],
            ended: SequenceFinish | None,
        ) -> None:
            calls.append((choice, first_token, list(token_ids)))

    session, owner = Session(Welcome()), Recorder()
    group = session.submit(Submit(choices=[SequenceStart(choice=0), SequenceStart(choice=1)]), [1, 2], owner=owner)
    outputs = StepOutputs(
        groups=[group] * 5,
        choices=[0, 1, 0, 1, 0],
        first_tokens=[0, 0, 2, 2, 3],
        num_tokens=[2, 1, 1, 1, 1],
        token_ids=[10, 11, 20, 12, 22, 13],
    )
    session.receive(SchedulerMessage(outputs=outputs))
    assert calls == [(0, 0, [10, 11, 12, 13]), (1, 0, [20]), (1, 2, [22])]


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (StepOutputs(groups=[1], choices=[0], first_tokens=[0]), "num_tokens has 0 entries for 1 groups"),
        (StepOutputs(choices=[0]), "choices has 1 entries for 0 groups"),
        (
            StepOutputs(groups=[1], choices=[0], first_tokens=[0], num_tokens=[2**32 - 1], token_ids=[5]),
            "token_ids has 1 entries; the sum of num_tokens is 4294967295",
        ),
        (
            StepOutputs(
                groups=[1], choices=[0], first_tokens=[0], num_tokens=[1], token_ids=[5], logprobs=[TokenLogprobs()]
            ),
            "logprobs has 1 entries where 0 tokens",
        ),
    ],
)
def test_columns_that_do_not_fit_end_the_session(outputs: StepOutputs, words: str) -> None:
    session = Session(Welcome())
    session.submit(Submit(choices=[SequenceStart(choice=0)]), [1, 2], owner=Owner())
    with pytest.raises(SessionError, match=words):
        session.receive(SchedulerMessage(outputs=outputs))


def test_a_model_of_which_nothing_can_be_asked_ends_the_session() -> None:
    with pytest.raises(SessionError, match=r"welcome\.model\.block_size is 0"):
        Session(Welcome()).receive(SchedulerMessage(welcome=Welcome(epoch=2)))


async def test_owners_of_a_lost_session_are_told_in_slices() -> None:
    """One callback that builds the messages of 1,000 streams of 8,000 tokens again held the loop for 0.5 s."""
    session, told, groups = Session(Welcome()), [], []

    class Losing(Owner):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def on_lost(self, cause: str) -> None:
            told.append(self.number)
            time.sleep(SLICE_S)

    for number in range(6):
        owner = Losing(number)
        groups.append(session.submit(Submit(choices=[SequenceStart(choice=0)]), [1, 2], owner=owner))
    session.lose("gone")
    assert session.closed
    assert told == [0]
    await asyncio.sleep(0)
    assert told == [0, 1]
    # An owner that has left meanwhile is not told.
    session.leave(groups[3])
    while session.num_groups:  # noqa: ASYNC110 (it has no event)
        await asyncio.sleep(0)
    assert told == [0, 1, 2, 4, 5]


async def test_a_large_message_is_taken_in_while_the_loop_runs() -> None:
    """110,000 tokens, which fit into 1 MiB, held the loop for 0.3 s."""
    session, told, groups = Session(Welcome()), [], []

    class Slow(Owner):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def on_tokens(
            self,
            choice: int,
            first_token: int,
            token_ids: Sequence[int],
            logprobs: Sequence[TokenLogprobs],
            ended: SequenceFinish | None,
        ) -> None:
            super().on_tokens(choice, first_token, token_ids, logprobs, ended)
            told.append(self.number)
            if self.number % 32 == 0:
                time.sleep(SLICE_S)

    owners = [Slow(number) for number in range(200)]
    for owner in owners:
        groups.append(session.submit(Submit(choices=[SequenceStart(choice=0)]), [1, 2], owner=owner))
    steps = 3
    outputs = StepOutputs(
        groups=groups * steps,
        choices=[0] * len(groups) * steps,
        first_tokens=[step for step in range(steps) for _ in groups],
        num_tokens=[1] * len(groups) * steps,
        token_ids=range(len(groups) * steps),
        finishes=[SequenceFinish(group=group, reason=FINISH_REASON_LENGTH) for group in groups],
    )
    taking = asyncio.create_task(session.receive_in_slices(SchedulerMessage(outputs=outputs)))
    while not told:  # noqa: ASYNC110 (it has no event)
        await asyncio.sleep(0)
    assert len(told) < 100
    assert not taking.done()
    # An owner that leaves meanwhile gets nothing more; one that comes is not concerned.
    session.leave(groups[150])
    late = Slow(1000)
    session.submit(Submit(choices=[SequenceStart(choice=0)]), [1, 2], owner=late)
    await taking
    assert told == [number for number in range(200) if number != 150]
    assert owners[7].token_ids == {0: [7, 207, 407]}
    assert session.num_groups == 1


async def test_wrong_columns_are_found_before_anything_is_passed_on() -> None:
    session, owner = Session(Welcome()), Owner()
    group = session.submit(Submit(choices=[SequenceStart(choice=0)]), [1, 2], owner=owner)
    outputs = StepOutputs(
        groups=[group], choices=[0], first_tokens=[0], num_tokens=[1], token_ids=[5], logprobs=[TokenLogprobs()]
    )
    with pytest.raises(SessionError, match="logprobs has 1 entries where 0 tokens"):
        await session.receive_in_slices(SchedulerMessage(outputs=outputs))
    assert owner.token_ids == {}


def _item(data: bytes) -> PackedItem:
    return PackedItem(ITEM_KIND_IMAGE, [data], 0.0, ItemOptions())


async def _sent(session: Session) -> list[str | tuple[bytes, int]]:
    """Takes what waits to be written: submits, and each item's name with its number of parts."""
    found: list[str | tuple[bytes, int]] = []
    while not session.outgoing.empty():
        messages = list(await session.next_messages())
        kinds = {message.WhichOneof("message") for message in messages}
        assert len(kinds) == 1
        assert all(message.ByteSize() <= SESSION_MESSAGE_BYTES for message in messages)
        if kinds == {"item_part"}:
            data = b"".join(message.item_part.data for message in messages)
            part = messages[0].item_part
            assert len(data) == part.num_bytes
            assert item_name(data) == part.name
            found.append((part.name, len(messages)))
        else:
            found += sorted(kind or "" for kind in kinds)
    return found


async def test_items_go_before_the_first_group_that_names_them_and_once() -> None:
    session, owner = Session(Welcome()), Owner()
    small, large = _item(b"small"), _item(bytes(5 * 2**19))

    def submit(*items: PackedItem) -> int:
        return session.submit(Submit(choices=[SequenceStart()]), [1], owner=owner, items=items)

    submit(small, large)
    submit(small)
    assert await _sent(session) == [(small.name, 1), (large.name, 3), "submit", "submit"]
    # A new epoch has the scheduler's items.
    welcome = Welcome(epoch=2)
    welcome.model.MergeFrom(ModelInfo(block_size=16, max_model_len=10, vocab_size=10))
    session.receive(SchedulerMessage(welcome=welcome))
    submit(large)
    assert await _sent(session) == ["submit"]


async def test_wanted_items_are_sent_again_while_a_group_has_them() -> None:
    session, owner = Session(Welcome()), Owner()
    first, second = _item(b"first"), _item(b"second")
    groups = [
        session.submit(Submit(choices=[SequenceStart()]), [1], owner=owner, items=[each]) for each in (first, second)
    ]
    # Wanted while it still waits to be sent: once is enough.
    session.receive(SchedulerMessage(wanted_items=[first.name]))
    assert await _sent(session) == [(first.name, 1), "submit", (second.name, 1), "submit"]
    session.receive(SchedulerMessage(wanted_items=[first.name, second.name, b"x" * 32]))
    assert await _sent(session) == [(first.name, 1), (second.name, 1)]
    # Its owner has left, and with it the right to the bytes.
    session.leave(groups[0])
    session.receive(SchedulerMessage(wanted_items=[first.name, second.name]))
    assert await _sent(session) == [(second.name, 1)]
