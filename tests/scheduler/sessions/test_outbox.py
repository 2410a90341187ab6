"""Outputs on their way to a router: columns, split by Session and into messages of at most 1 MiB."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from protos import inference_pb2, scheduler_pb2
from runtime.wire import SESSION_MESSAGE_BYTES
from scheduler.core.messages import FinishReason
from scheduler.sessions.sessions import (
    MAX_ROUTER_GROUP,
    MAX_SESSION,
    Outbox,
    OutputColumns,
    group_number,
    split_numbers,
)


def columns(
    groups: list[int], tokens: list[list[int]] | list[int], logprobs: Mapping[int, Sequence[object]] | None = None
) -> OutputColumns:
    """tokens: one token per entry, or a list per entry."""
    several = bool(tokens) and isinstance(tokens[0], list)
    each = [token if isinstance(token, list) else [token] for token in tokens]
    return OutputColumns(
        groups=np.array(groups, np.int64),
        choices=np.arange(len(groups), dtype=np.int32) % 3,
        first_tokens=np.arange(len(groups), dtype=np.int32) + 100,
        num_tokens=np.array([len(ids) for ids in each], np.int32) if several else None,
        token_ids=np.array([token for ids in each for token in ids], np.int32),
        logprobs=logprobs or {},
    )


def logprob(token_id: int, num_top: int = 0) -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(
        chosen=inference_pb2.TokenLogprob(token_id=token_id),
        top=[inference_pb2.TokenLogprob(token_id=token_id, logprob=-i, rank=i) for i in range(1, num_top + 1)],
    )


def take(outbox: Outbox) -> list[scheduler_pb2.SchedulerMessage]:
    payloads = [parcel.message for parcel in outbox.take()]
    assert all(len(payload) <= SESSION_MESSAGE_BYTES for payload in payloads)
    return [scheduler_pb2.SchedulerMessage.FromString(payload) for payload in payloads]


def rebuilt(messages: list[scheduler_pb2.SchedulerMessage]) -> list[tuple[int, int, int, list[int]]]:
    """(group, choice, first token, tokens) of each entry."""
    found = []
    for message in messages:
        outputs, start = message.outputs, 0
        for group, choice, first, count in zip(
            outputs.groups, outputs.choices, outputs.first_tokens, outputs.num_tokens, strict=True
        ):
            found.append((group, choice, first, list(outputs.token_ids[start : start + count])))
            start += count
        assert start == len(outputs.token_ids)
    return found


def test_steps_of_a_round_are_one_message():
    outbox = Outbox()
    outbox.add_columns(columns([7, 8], [50, 51]))
    outbox.add_columns(columns([7, 9], [[52, 53], [54]]))
    outbox.add_finish(7, 0, FinishReason.LENGTH, num_cached_tokens=4)
    [message] = take(outbox)
    assert rebuilt([message]) == [(7, 0, 100, [50]), (8, 1, 101, [51]), (7, 0, 100, [52, 53]), (9, 1, 101, [54])]
    assert [(finish.group, finish.num_cached_tokens) for finish in message.outputs.finishes] == [(7, 4)]
    assert outbox.take() == []


@pytest.mark.parametrize("several", [False, True])
def test_more_than_a_message_holds_is_split_in_order(several: bool):
    count = 100_000
    tokens = [[i, i + 1] for i in range(count)] if several else list(range(count))
    outbox = Outbox()
    for _ in range(2):
        outbox.add_columns(columns(list(range(1, count + 1)), tokens))
    outbox.add_finish(count, 0, FinishReason.STOP)
    messages = take(outbox)
    assert len(messages) > 6
    each = [(i + 1, i % 3, i + 100, [i, i + 1] if several else [i]) for i in range(count)]
    assert rebuilt(messages) == each * 2
    assert not any(message.outputs.finishes for message in messages[:-1])


def test_logprobs_stay_with_their_tokens_where_messages_split():
    # Each sequence's logprobs take 0.3 MiB: three fit into a message.
    groups = list(range(1, 9))
    asked: dict[int, Sequence[object]] = {
        i: [logprob(1000 * i, 12_000), logprob(1000 * i + 1, 12_000)] for i in range(8) if i != 2
    }
    outbox = Outbox()
    outbox.add_columns(columns(groups, [[1000 * i, 1000 * i + 1] for i in range(8)], asked))
    messages = take(outbox)
    assert len(messages) == 3
    assert [entry[0] for entry in rebuilt(messages)] == groups
    for message in messages:
        ids = [token for group, _, _, tokens in rebuilt([message]) if group != 3 for token in tokens]
        assert [entry.chosen.token_id for entry in message.outputs.logprobs] == ids


def test_the_largest_entries_there_can_be_stay_below_the_bound():
    entry = inference_pb2.TokenLogprob(token_id=2**31, logprob=-1.0, rank=2**31)
    logprobs = {i: [inference_pb2.TokenLogprobs(chosen=entry, top=[entry] * 20)] for i in range(6000)}
    outbox = Outbox()
    outbox.add_columns(
        OutputColumns(
            groups=np.arange(6000) + 2**60,
            choices=np.full(6000, 63, np.int32),
            first_tokens=np.full(6000, 2**31 - 1, np.int32),
            num_tokens=None,
            token_ids=np.full(6000, 2**31 - 1, np.int32),
            logprobs=logprobs,
        )
    )
    parcels = outbox.take(scheduler_pb2.Load(num_running=6000), scheduler_pb2.Welcome(epoch=1))
    payloads = [parcel.message for parcel in parcels]
    assert len(payloads) > 1
    assert max(map(len, payloads)) <= SESSION_MESSAGE_BYTES
    messages = [scheduler_pb2.SchedulerMessage.FromString(payload) for payload in payloads]
    assert [group for message in messages for group in message.outputs.groups] == list(range(2**60, 2**60 + 6000))
    assert all(len(message.outputs.logprobs) == len(message.outputs.token_ids) for message in messages)
    assert [message.HasField("load") for message in messages] == [True] + [False] * (len(messages) - 1)
    assert [message.HasField("welcome") for message in messages] == [True] + [False] * (len(messages) - 1)


def test_a_part_of_the_columns_keeps_tokens_and_logprobs():
    whole = columns([1, 2, 3, 4], [[10], [20, 21], [30, 31, 32], [40]], {1: [logprob(20)], 3: [logprob(40)]})
    part = whole.take(np.array([1, 3]))
    assert part.num_tokens is not None
    assert (part.groups.tolist(), part.num_tokens.tolist(), part.token_ids.tolist()) == ([2, 4], [2, 1], [20, 21, 40])
    assert part.logprobs == {0: [logprob(20)], 1: [logprob(40)]}


def test_group_numbers_hold_session_and_group():
    pairs = [(1, 0), (1, MAX_ROUTER_GROUP), (2, 0), (MAX_SESSION, 12), (MAX_SESSION, MAX_ROUTER_GROUP)]
    numbers = [group_number(*pair) for pair in pairs]
    assert len(set(numbers)) == len(pairs)
    assert max(numbers) <= 2**62
    sessions, groups = split_numbers(np.array(numbers, np.int64))
    assert list(zip(sessions.tolist(), groups.tolist(), strict=True)) == pairs
    for wrong in ((0, 1), (MAX_SESSION + 1, 1), (1, MAX_ROUTER_GROUP + 1)):
        with pytest.raises(AssertionError):
            group_number(*wrong)
