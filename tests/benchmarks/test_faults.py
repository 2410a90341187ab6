"""The parts of benchmarks.faults: which faults it draws, what it requests, how it detects differences and judges."""

import asyncio
import dataclasses
import itertools
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.faults.__main__ import choose_faults
from benchmarks.faults.cluster import Kind, Place, place_of
from benchmarks.faults.crowd import Crowd, Outcome, Plan, Verdict, differences, judge, make_plans
from benchmarks.faults.driver import Blow, Fault, Hit, Traffic, injections, run, table
from benchmarks.faults.kinds import FAULTS, GREY
from benchmarks.faults.kinds.kills import KILLS, choose_kills
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
    kills = choose_kills(20, random.Random(0))
    assert Counter(kill.name for kill in kills if kill.name.count("-") == 1) == {f"kill-{kind}": 5 for kind in Kind}
    assert sum(kill.name.count("-") == 2 for kill in kills) == 5
    assert KILLS[Kind.SCHEDULER, Kind.SCHEDULER] in kills, "no kill leaves the cluster without a replica"


@pytest.mark.parametrize("num_kills", range(3, 12))
def test_each_kind_is_killed(num_kills: int) -> None:
    kills = choose_kills(num_kills, random.Random(0))
    assert len(kills) == num_kills
    assert {kind for kinds, kill in KILLS.items() for kind in kinds if kill in kills} == set(Kind)


def test_kinds_come_in_turn_or_without_an_end() -> None:
    choose = random.Random(0)
    names = [fault.name for fault in choose_faults(["stop", "rank"], 8, choose)]
    assert names[:7] == [*(name for name in FAULTS if name.startswith("stop-")), "rank"]
    assert names[7] == names[0]
    endless = {fault.name for fault in itertools.islice(choose_faults(["kill", "grey"], None, choose), 500)}
    assert endless >= {fault.name for fault in GREY.values() if not fault.missing()} | {"kill-worker"}
    with pytest.raises(ValueError, match="nonesuch: there are grey, and kill-worker"):
        choose_faults(["nonesuch"], 1, choose)


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
    assert words in difference


def test_the_first_other_token_is_told_with_its_time() -> None:
    (difference,) = differences(outcome(token_ids=(1, 2, 4)), outcome())
    assert difference.endswith(", at 2.5 s")


async def test_each_plan_runs_once_before_any_again_and_no_two_of_one_at_once() -> None:
    class Quiet(Crowd):
        async def _follow(self, plan: Plan) -> Outcome:
            asked.append(plan.number)
            await gate.wait()
            return self._ended(plan, self._live[plan.number], outcome().generation, None)

    asked, gate = list[int](), asyncio.Event()
    plans = [dataclasses.replace(plan, is_unique=plan.number == 1) for plan in make_plans(3, 0, mean_tokens=8)]
    async with Quiet(["localhost:1"], plans) as crowd:
        # All are live: there is none to start.
        crowd.start(5)
        await asyncio.sleep(0)
        assert asked == [0, 1, 2]
        gate.set()
        await crowd.fewer_live(1)
        crowd.start(4)
        assert len(await crowd.finish()) == 5
        assert sorted(asked[3:]) == [0, 2]


def test_a_stream_that_lacks_tokens_is_lost_and_one_with_more_has_some_twice() -> None:
    lost, twice = (judge(outcome(token_ids=ids), outcome(), 0.0) for ids in ((1, 2), (1, 2, 3, 3)))
    assert (lost.is_lost, lost.is_duplicated, twice.is_lost, twice.is_duplicated) == (True, False, False, True)
    assert lost.found
    assert twice.found
    inexact = judge(outcome(exact=False), outcome(), 0.0)
    assert inexact.found == ["choice 0: inexact"]


@pytest.mark.parametrize(("may_restart", "problems"), [({"worker 0.0"}, 0), (set(), 1)])
async def test_a_process_that_is_restarted_without_need_spoils_a_report(may_restart: set[str], problems: int) -> None:
    processes = {Place(Kind.WORKER, 0): SimpleNamespace(pid=1)}
    up = SimpleNamespace(process=SimpleNamespace(pid=9))
    cluster = SimpleNamespace(processes=lambda: processes, up=up)
    ground: Any = SimpleNamespace(cluster=cluster, is_patient=True, wait_until_serving=lambda _: asyncio.sleep(0))

    async def replace_worker(*_: object) -> Blow:
        processes[Place(Kind.WORKER, 0)] = SimpleNamespace(pid=2)
        return Blow(victims=["worker 0.0"], may_restart=may_restart)

    fault = Fault(name="it", what="", inject=replace_worker)
    report = await run(ground, Traffic(ground, print), injections([fault], 0, longest=1.0), 0)
    assert report.hits[0].restarted == ["worker 0.0"]
    assert report.problems == ["it 0: worker 0.0 was restarted without need"] * problems
    assert report.is_clean == (not problems)


async def test_what_fails_beside_a_fault_ends_the_run() -> None:
    class Failing(Traffic):
        async def go_on(self, fault: Fault, counts: Counter[str]) -> None:
            raise ValueError("it fails")

    up = SimpleNamespace(process=SimpleNamespace(pid=9))
    cluster = SimpleNamespace(processes=dict, up=up)
    ground: Any = SimpleNamespace(cluster=cluster, is_patient=True, wait_until_serving=lambda _: asyncio.sleep(0))

    async def nothing(*_: object) -> Blow:
        await asyncio.sleep(0)
        return Blow(victims=[])

    fault = Fault(name="it", what="", inject=nothing)
    with pytest.raises(ValueError, match="it fails"):
        await run(ground, Failing(ground, print), injections([fault], 0, longest=1.0), 0)


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


def verdict(*arrivals: float, began: float = 0.0, ended: float = 10.0, is_lost: bool = False) -> Verdict:
    return Verdict(
        number=0,
        is_sampled=True,
        began=began,
        ended=ended,
        arrivals=list(arrivals),
        is_lost=is_lost,
        is_duplicated=False,
        found=[],
    )


@pytest.mark.parametrize(
    ("arrivals", "window", "gap"),
    [
        ((1.0, 2.0, 9.0), (3.0, 4.0), 7.0),
        ((1.0, 2.0, 9.0), (0.5, 1.5), 1.0),
        ((6.0,), (1.0, 2.0), 6.0),
        ((1.0,), (5.0, 6.0), 9.0),
    ],
)
def test_the_longest_gap_is_one_that_overlaps_the_fault(
    arrivals: tuple[float, ...], window: tuple[float, float], gap: float
) -> None:
    assert verdict(*arrivals).longest_gap(*window) == gap


def test_a_fault_counts_the_streams_that_lived_while_it_lasted() -> None:
    hit = Hit(
        kind="stop-worker",
        number=0,
        seconds=2.0,
        victims=["worker 0.1"],
        note="",
        begin=3.0,
        end=5.0,
        restarted=["worker 0.1", "scheduler 1"],
        unexpected=["scheduler 1"],
        problems=[],
        verdicts=[verdict(3.5, is_lost=True)],
    )
    hit.judge([verdict(ended=2.0), verdict(began=8.0), verdict(4.0)])
    assert hit.gaps == [6.0, 6.5]
    assert (hit.counts["streams"], hit.counts["sampled"], hit.counts["lost"], hit.counts["differ"]) == (2, 2, 1, 0)
    shown = "\n".join(table([hit, dataclasses.replace(hit, kind="clock")]))
    assert "all 2 kinds" in shown
    assert "2 workers, 2 schedulers" in shown


def test_lengths_are_drawn_by_seed_and_within_bounds() -> None:
    faults = [*GREY.values()] * 10
    drawn = list(injections(faults, 3, longest=15.0))
    assert drawn == list(injections(faults, 3, longest=15.0))
    assert all(each.fault.seconds[0] <= each.seconds <= 15.0 for each in drawn)
    assert len({each.seconds for each in drawn if each.fault.name == "stop-worker"}) == 10
    assert FAULTS["stop-worker"].draw_seconds(random.Random(0), 1.0) == 2.0


def test_there_are_all_kinds_that_are_promised() -> None:
    for subject in ("kill-", "rank", "stop-", "slow-", "net-", "disk-", "descriptors-", "clock", "memory-"):
        assert any(name.startswith(subject) for name in FAULTS), subject
    assert len(GREY) == 31
