"""The choice of a replica, and the load it rests on."""

from collections import Counter
from typing import cast

import pytest

from protos import scheduler_pb2 as wire
from protos.inference_pb2 import SamplingParams
from router.policies import LeastLoaded, ReplicaLoad
from router.session import GroupOwner, Session


def _load(num_sequences: int, num_queued_tokens: int = 0, *, workers_ready: bool = True) -> ReplicaLoad:
    return ReplicaLoad(num_sequences=num_sequences, num_queued_tokens=num_queued_tokens, workers_ready=workers_ready)


@pytest.mark.parametrize(
    ("loads", "index", "reason"),
    [
        ([_load(9)], 0, "only"),
        ([_load(2), _load(1)], 1, "least"),
        ([_load(1, 500), _load(1, 20)], 1, "least"),
        ([_load(0, workers_ready=False), _load(50)], 1, "least"),
    ],
)
def test_the_least_loaded_is_chosen(loads: list[ReplicaLoad], index: int, reason: str) -> None:
    assert LeastLoaded().choose(loads) == (index, reason)


def test_equals_take_turns() -> None:
    policy = LeastLoaded()
    chosen = Counter(policy.choose([_load(1), _load(0), _load(0), _load(0)])[0] for _ in range(30))
    assert chosen == {1: 10, 2: 10, 3: 10}


async def test_own_submissions_count_until_a_load_has_seen_them() -> None:
    # Without this, a burst goes to one replica as a whole: its load is news only after the next step.
    session, nobody = Session(wire.Welcome()), cast(GroupOwner, object())
    session.receive(wire.SchedulerMessage(load=wire.Load(num_running=3, num_waiting=1, num_queued_tokens=100)))
    for choices in (1, 2):
        starts = [wire.SequenceStart(choice=i) for i in range(choices)]
        session.submit(wire.Submit(sampling=SamplingParams(), choices=starts), [1, 2, 3], nobody)
    assert (session.num_sequences, session.num_queued_tokens) == (4 + 3, 100 + 6)
    session.receive(wire.SchedulerMessage(load=wire.Load(num_running=5, last_group=1)))
    assert (session.num_sequences, session.num_queued_tokens) == (5 + 2, 3)
    session.receive(wire.SchedulerMessage(load=wire.Load(num_running=7, last_group=2)))
    assert (session.num_sequences, session.num_queued_tokens) == (7, 0)
