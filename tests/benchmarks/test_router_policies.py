"""The gain of each policy, in simulated time (benchmarks/router/policies.py; the simulation is deterministic)."""

import random

from benchmarks.router.policies import make_requests, simulate
from router.replicas.policies import POLICIES, Policy
from router.replicas.policies.power_of_two import PowerOfTwo


def _figures(workload: str, policy: Policy) -> dict[str, float]:
    return simulate(policy, make_requests(workload, num_replicas=8, seconds=3.0, load=0.8), 8)


def test_prefixes_are_found_where_they_are_and_the_first_token_comes_sooner() -> None:
    aware, in_turn = (_figures("few prefixes", POLICIES[name]()) for name in ("prefix_aware", "round_robin"))
    assert aware["found"] > 1.4 * in_turn["found"]
    assert aware["ttft_mean_ms"] < 0.9 * in_turn["ttft_mean_ms"]


def test_nothing_is_lost_where_prompts_have_nothing_in_common() -> None:
    aware, least = (_figures("nothing in common", POLICIES[name]()) for name in ("prefix_aware", "least_loaded"))
    assert aware["ttft_mean_ms"] < 1.02 * least["ttft_mean_ms"]


def test_two_choices_are_far_better_than_one() -> None:
    class AtRandom(PowerOfTwo):
        def choose(self, loads, hints):
            return self.random.randrange(len(loads)), "random"

        random = random.Random(0)

    two, one = (_figures("nothing in common", policy) for policy in (PowerOfTwo(seed=0), AtRandom()))
    assert two["ttft_p99_ms"] < 0.7 * one["ttft_p99_ms"]


def test_conversations_stay_where_their_prefix_is() -> None:
    by_session, in_turn = (_figures("conversations", POLICIES[name]()) for name in ("consistent_hash", "round_robin"))
    assert by_session["found"] > 3 * in_turn["found"]
