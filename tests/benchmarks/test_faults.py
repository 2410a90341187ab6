"""The parts of benchmarks.faults.chaos: which processes it kills, what it requests, and how it detects differences."""

import dataclasses
import itertools
import random
from collections import Counter

import pytest

from benchmarks.faults.cluster import Kind, Place, place_of
from benchmarks.faults.crowd import Outcome, differences, make_plans
from benchmarks.faults.kills import choose_kinds
from octavo.client.results import Choice, FinishReason, Generation, Usage

PLAN = make_plans(2, 0, mean_tokens=8)[1]


def outcome(**changes) -> Outcome:
    """An outcome with one choice of three tokens."""
    choice = Choice(
        index=0, text="abc", token_ids=(1, 2, 3), logprobs=(), finish_reason=FinishReason.LENGTH, stop=None, exact=True
    )
    choice = dataclasses.replace(choice, **{name: value for name, value in changes.items() if hasattr(choice, name)})
    generation = Generation(
        request_id="",
        model="",
        seed=changes.get("seed", 5),
        prompt_token_ids=(7,),
        choices=(choice,),
        prompt_logprobs=(),
        usage=Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=len(choice.token_ids)),
        fingerprint="",
        num_resumes=0,
    )
    return Outcome(plan=PLAN, generation=generation, arrivals=[(1.5, 0, 2), (2.5, 0, 3)])


def test_twenty_kills_are_each_kind_five_times_alone_and_five_of_two_at_once() -> None:
    kinds = choose_kinds(20, random.Random(0))
    assert Counter(each for each in kinds if len(each) == 1) == {(kind,): 5 for kind in Kind}
    assert sum(len(each) == 2 for each in kinds) == 5
    assert (Kind.SCHEDULER, Kind.SCHEDULER) in kinds, "no kill leaves the cluster without a replica"


@pytest.mark.parametrize("num_kills", range(3, 12))
def test_each_kind_is_killed(num_kills: int) -> None:
    kinds = choose_kinds(num_kills, random.Random(0))
    assert len(kinds) == num_kills
    assert set(itertools.chain(*kinds)) == set(Kind)


def test_half_of_the_streams_are_sampled_and_half_of_these_have_no_seed() -> None:
    plans = make_plans(80, 1, mean_tokens=40)
    sampled = [plan for plan in plans if plan.sampling.temperature]
    assert len(sampled) == 40
    assert sum(plan.sampling.seed is None for plan in sampled) == 20
    assert [plan.has_seed for plan in plans].count(False) == 20
    for kind in ("logprobs", "prompt_logprobs", "stop", "repetition_penalty"):
        assert any(getattr(plan.sampling, kind) for plan in plans), kind
    assert {plan.sampling.n for plan in plans} == {1, 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": (1, 2, 4)}, "choice 0 from token 2: [4], not [3], of 3 and 3 tokens"),
        ({"token_ids": (1, 2)}, "choice 0 from token 2: [], not [3], of 2 and 3 tokens"),
        ({"token_ids": (1, 2, 3, 3)}, "choice 0 from token 3: [3], not [], of 4 and 3 tokens"),
        ({"text": "abbc"}, "choice 0: another text"),
        ({"finish_reason": FinishReason.STOP}, "another finish_reason"),
        ({"seed": 6}, "another seed"),
    ],
)
def test_it_sees_what_was_lost_or_came_twice(changes: dict, words: str) -> None:
    assert not differences(outcome(), outcome())
    (difference,) = differences(outcome(**changes), outcome())
    assert words in str(difference)


def test_the_first_other_token_is_told_with_its_time() -> None:
    (difference,) = differences(outcome(token_ids=(1, 2, 4)), outcome())
    assert difference.at == 2.5


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["python", "-m", "worker", "-c", "x", "--replica", "1", "--rank", "3"], Place(Kind.WORKER, 1, 3)),
        (["python", "-m", "scheduler", "-c", "x", "--replica", "2"], Place(Kind.SCHEDULER, 2)),
        (["python", "-m", "router", "-c", "x", "--router", "1"], Place(Kind.ROUTER, 1)),
        (["python", "-m", "pip", "-c", "x"], None),
        (["sleep"], None),
    ],
)
def test_processes_are_known_by_their_command_lines(arguments: list[str], place: Place | None) -> None:
    assert place_of(arguments) == place
