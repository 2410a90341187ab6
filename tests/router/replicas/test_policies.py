"""The choice of a replica, and the load that it is based on."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from configs.options import Options
from protos import scheduler_pb2 as wire
from protos.inference_pb2 import SamplingParams
from router.accepted import RoutingHints
from router.replicas.policies import POLICIES, ReplicaLoad
from router.replicas.policies.consistent_hash import ConsistentHash
from router.replicas.policies.least_loaded import LeastLoaded
from router.replicas.policies.power_of_two import PowerOfTwo
from router.replicas.policies.prefix_aware import PrefixAware
from router.replicas.policies.round_robin import RoundRobin
from router.replicas.session import Session

NOTHING = RoutingHints(token_ids=())


def _loads(*each: tuple[int, int], away: tuple[int, ...] = ()) -> list[ReplicaLoad]:
    """Loads from (sequences, queued tokens) of each replica; replicas in `away` have no workers."""
    return [
        ReplicaLoad(replica=i, num_sequences=sequences, num_queued_tokens=tokens, workers_ready=i not in away)
        for i, (sequences, tokens) in enumerate(each)
    ]


def test_the_option_names_all_policies() -> None:
    for name in POLICIES:
        assert POLICIES[name]().name == Options(routing_policy=name).routing_policy  # type: ignore[arg-type]
    assert len(POLICIES) == 5


@pytest.mark.parametrize("name", POLICIES)
def test_a_replica_without_workers_comes_last(name: str) -> None:
    policy = POLICIES[name]()
    if policy.prefix_index is not None:
        for replica in range(3):
            policy.prefix_index.add(replica, block_size=4, max_blocks=100)
    hints = RoutingHints(token_ids=range(8), session_key="s")
    assert policy.choose(_loads((9, 9)), hints) == (0, "only")
    loads = _loads((0, 0), (50, 9000), (0, 0), away=(0, 2))
    assert {policy.choose(loads, hints)[0] for _ in range(10)} == {1}
    # No replica has workers: the request waits at one of them.
    assert policy.choose(_loads((0, 0), (0, 0), away=(0, 1)), hints)[0] in (0, 1)


# --- Each of them


@pytest.mark.parametrize(
    ("loads", "index"),
    [(_loads((2, 0), (1, 0)), 1), (_loads((1, 500), (1, 20)), 1), (_loads((10, 0), (1, 200), (12, 0)), 1)],
)
def test_the_least_loaded_is_chosen(loads: list[ReplicaLoad], index: int) -> None:
    assert LeastLoaded().choose(loads, NOTHING) == (index, "least")


def test_equals_take_turns() -> None:
    policy = LeastLoaded()
    chosen = Counter(policy.choose(_loads((1, 0), (0, 0), (0, 0), (0, 0)), NOTHING)[0] for _ in range(30))
    assert chosen == {1: 10, 2: 10, 3: 10}


def test_round_robin_goes_on_after_the_last_one_though_another_is_missing() -> None:
    policy, loads = RoundRobin(), _loads((5, 0), (0, 0), (9, 9))
    assert [policy.choose(loads, NOTHING)[0] for _ in range(4)] == [0, 1, 2, 0]
    # The replica whose turn it is has gone.
    assert policy.choose([loads[0], loads[2]], NOTHING) == (1, "turn")


def test_of_two_the_less_loaded_is_chosen_and_the_most_loaded_never() -> None:
    policy = PowerOfTwo(seed=0)
    chosen = Counter(policy.choose(_loads((0, 0), (1, 0), (2, 0), (3, 0)), NOTHING)[0] for _ in range(600))
    # Six pairs: the first replica wins three of them, the second two, the third one.
    assert 240 < chosen[0] < 360
    assert 140 < chosen[1] < 260
    assert 60 < chosen[2] < 140
    assert not chosen[3]


def test_a_session_stays_where_it_is_and_few_move_when_one_goes() -> None:
    policy, loads = ConsistentHash(), _loads(*[(0, 0)] * 10)
    sessions = [RoutingHints(token_ids=(), session_key=f"session {i}") for i in range(500)]
    before = [policy.choose(loads, each)[0] for each in sessions]
    assert before == [policy.choose(loads, each)[0] for each in sessions]
    assert max(Counter(before).values()) < 2 * 50
    after = [policy.choose(loads[:-1], each)[0] for each in sessions]
    assert all(now == then for now, then in zip(after, before, strict=True) if then != 9)


def test_a_session_leaves_one_that_has_far_more_to_do_than_the_others() -> None:
    policy, session = ConsistentHash(), RoutingHints(token_ids=(), session_key="s")
    home, reason = policy.choose(_loads(*[(1, 0)] * 4), session)
    assert reason == "session"
    busy = _loads(*[(1, 90_000 * (i == home)) for i in range(4)])
    away, reason = policy.choose(busy, session)
    assert (away != home, reason) == (True, "overload")
    # Requests without a session are placed by load.
    assert policy.choose(busy, NOTHING)[0] != home


class TestPrefixAware:
    PROMPT = RoutingHints(token_ids=range(1000, 1400))

    @pytest.fixture
    def policy(self) -> PrefixAware:
        policy = PrefixAware()
        for replica in range(3):
            policy.prefix_index.add(replica, block_size=16, max_blocks=1000)
        return policy

    def test_what_was_sent_somewhere_draws_what_is_like_it(self, policy: PrefixAware) -> None:
        loads = _loads((0, 0), (0, 0), (0, 0))
        first, reason = policy.choose(loads, self.PROMPT)
        assert reason == "load"
        longer = RoutingHints(token_ids=range(1000, 1500))
        assert {policy.choose(loads, longer) for _ in range(5)} == {(first, "prefix")}
        assert policy.choose(loads, RoutingHints(token_ids=range(1000, 1400), cache_salt="other"))[1] == "load"

    def test_a_queue_longer_than_what_the_cache_saves_sends_it_elsewhere(self, policy: PrefixAware) -> None:
        first, _ = policy.choose(_loads((0, 0), (0, 0), (0, 0)), self.PROMPT)
        for queued, reason in ((400 + 500, "prefix"), (400 + 520, "balance")):
            loads = _loads(*[(0, queued * (i == first)) for i in range(3)])
            chosen, said = policy.choose(loads, self.PROMPT)
            assert said == reason
            assert (chosen == first) == (reason == "prefix")

    def test_what_no_cache_holds_goes_round_those_with_about_as_much_to_do(self, policy: PrefixAware) -> None:
        loads = _loads((3, 0), (0, 200), (2, 3000))
        chosen = [policy.choose(loads, RoutingHints(token_ids=range(n, n + 100)))[0] for n in range(0, 400, 100)]
        assert chosen == [0, 1, 0, 1]


# --- The load


async def test_own_submissions_count_until_a_load_has_seen_them() -> None:
    # Otherwise a whole burst would go to one replica, whose next Load comes only after a step.
    session = Session(wire.Welcome())
    nobody: Any = SimpleNamespace(stream=None)
    session.receive(wire.SchedulerMessage(load=wire.Load(num_running=3, num_waiting=1, num_queued_tokens=100)))
    for choices in (1, 2):
        starts = [wire.SequenceStart(choice=i) for i in range(choices)]
        session.submit(wire.Submit(sampling=SamplingParams(), choices=starts), [1, 2, 3], owner=nobody)
    assert (session.num_sequences, session.num_queued_tokens) == (4 + 3, 100 + 6)
    session.receive(wire.SchedulerMessage(load=wire.Load(num_running=5, last_group=1)))
    assert (session.num_sequences, session.num_queued_tokens) == (5 + 2, 3)
    session.receive(wire.SchedulerMessage(load=wire.Load(num_running=7, last_group=2)))
    assert (session.num_sequences, session.num_queued_tokens) == (7, 0)
