"""Streams, half of them sampled, each of which must give what it gives undisturbed, down to the bits of its logprobs.

Some begin at once, the rest with the faults, so that each fault hits streams in mid-flight. Half of the sampled ones
have a seed of the client's; the others are asked once more with the seed that their routers chose. Before each kill,
and while its victims are away, some streams are migrated to another replica.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.crowd import Crowd, Outcome, Plan, Verdict, ask_all, differences, judge, make_plans
from benchmarks.faults.driver import Fault, Hit, Injection, Say, Traffic
from benchmarks.faults.ground import FLAGS, Ground, OwnFlags
from octavo.client.admin import Admin
from octavo.client.errors import InvalidRequest, RequestNotFound, Unavailable
from octavo.client.results import FinishReason

# Before each fault, live streams get at most this share of their outstanding tokens, so that it can lose some.
_LARGEST_SHARE = 0.3
_MOST_TOKENS = 300
_MOST_SECONDS = 0.2
# Streams that live when a fault begins, and the fewest while it lasts; streams that start during one, at most.
_NUM_LIVE, _FEWEST_LIVE, _MOST_MORE = 6, 3, 6


def _nothing(directory: Path) -> tuple[Sequence[str], OwnFlags]:
    return (), {}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKind:
    """Streams of one kind, and the cluster that they need.

    make: returns plans, from their number, a seed, and the tokens of a choice; tokens: these, by default. equip: writes
    what the cluster needs into a directory, and returns further flags, and own ones of some processes. check: returns
    what is wrong with an output by itself. reference: returns the stream to ask for undisturbed. crowd: makes the crowd
    that is disturbed, of plans and a seed. compare: compares a stream's outcome with the undisturbed one.
    """

    make: Callable[[int, int, int], list[Plan]]
    tokens: int = 80
    flags: Sequence[str] = FLAGS
    equip: Callable[[Path], tuple[Sequence[str], OwnFlags]] = _nothing
    check: Callable[[Outcome], list[str]] = lambda _: []
    reference: Callable[[Plan], Plan] = lambda plan: plan
    crowd: Callable[[Ground, Sequence[Plan], int], Crowd] = lambda ground, plans, _: Crowd(
        ground.cluster.targets, plans
    )
    compare: Callable[[Outcome, Outcome], list[str]] = differences


PLAIN = StreamKind(make=lambda count, seed, tokens: make_plans(count, seed, mean_tokens=tokens))


class Streams(Traffic):
    def __init__(
        self, ground: Ground, say: Say, kind: StreamKind, plans: Sequence[Plan], *, num_faults: int, seed: int
    ) -> None:
        super().__init__(ground, say)
        self._kind, self._plans = kind, plans
        self._num_more = len(plans) // (2 * max(num_faults, 1))
        self._num_first = len(plans) - self._num_more * num_faults if self._num_more else _NUM_LIVE
        self._choose = random.Random(f"{seed}/moves")
        self._num_moved = 0
        self._crowd = kind.crowd(ground, plans, seed)

    async def begin(self) -> None:
        plans = [plan for plan in self._plans if plan.has_seed]
        began = time.monotonic()
        outcomes = await ask_all(self.cluster.targets, [self._kind.reference(plan) for plan in plans])
        self._expected = dict(zip((plan.number for plan in plans), outcomes, strict=True))
        self.say(f"{len(plans)} streams, undisturbed, took {time.monotonic() - began:.1f} s")
        self._crowd.began = time.monotonic()
        self._crowd.start(self._num_first)

    async def is_ready(self, injection: Injection, choose: random.Random) -> bool:
        crowd = self._crowd
        crowd.start(max(0, _NUM_LIVE - crowd.num_live))
        # Waits by tokens, since a fast machine's streams end within seconds; then by time, off the beat of steps.
        await crowd.receive(int(min(choose.uniform(0, _LARGEST_SHARE) * crowd.num_outstanding, _MOST_TOKENS)))
        # Three lost workers in a row without progress in between would be blamed on a stream.
        await crowd.oldest_advance(_NUM_LIVE)
        await asyncio.sleep(choose.uniform(0, _MOST_SECONDS))
        await self._move(injection.fault.num_moves)
        if not crowd.num_begun:
            self.problems.append(f"{injection.fault.name} {injection.number}: no stream had begun; give more --tokens")
        return True

    async def go_on(self, fault: Fault, counts: Counter[str]) -> None:
        crowd = self._crowd
        counts.update(live=crowd.num_live, begun=crowd.num_begun)
        crowd.start(self._num_more)
        await self._move(fault.num_moves)
        for _ in range(_MOST_MORE):
            await crowd.fewer_live(_FEWEST_LIVE)
            crowd.start(1)

    async def end(self, hits: Sequence[Hit]) -> None:
        kind, crowd = self._kind, self._crowd
        outcomes = await crowd.finish()
        self.say(f"all {len(outcomes)} streams, disturbed, took {crowd.elapsed:.1f} s")
        counters = await self.cluster.counters()
        # The reference must not reuse KV blocks that were computed during the faults.
        await asyncio.to_thread(self.cluster.forget_prefixes)
        chosen = [each for each in outcomes if not each.plan.has_seed]
        again = await ask_all(self.cluster.targets, [kind.reference(each.reference) for each in chosen])
        asked = {id(each): outcome for each, outcome in zip(chosen, again, strict=True)}
        pairs = [(each, asked.get(id(each)) or self._expected[each.plan.number]) for each in outcomes]
        verdicts = [judge(*pair, crowd.began, kind.compare) for pair in pairs]
        for hit in hits:
            hit.judge(verdicts)
        self.problems += [f"stream {each.number}: {what}" for each in verdicts for what in each.found]
        undisturbed = [*self._expected.values(), *again]
        breaches = [
            f"stream {each.plan.number}: {what}" for each in (*outcomes, *undisturbed) for what in kind.check(each)
        ]
        if num_inexact := counters["octavo_inexact_resumes_total"]:
            self.problems.append(f"{num_inexact} resumes were inexact")
        usages = [each.generation.usage for each in outcomes if each.generation.usage is not None]
        self.problems += breaches
        self.figures = {
            "streams": len(outcomes),
            "equal": sum(not each.found for each in verdicts),
            "breaches": len(breaches),
            "resumes_by_clients": sum(each.generation.num_resumes for each in outcomes),
            "resubmissions_by_routers": counters["octavo_resubmissions_total"],
            "migrations": self._num_moved,
            "preemptions": counters["octavo_num_preemptions_total"],
            "draft_tokens": sum(usage.draft_tokens for usage in usages),
            "accepted_draft_tokens": sum(usage.accepted_draft_tokens for usage in usages),
            **({"reading": dict(sorted(crowd.counts.items()))} if crowd.counts else {}),
            "kinds": _count_kinds(outcomes, verdicts),
        }
        self.tables = self._tables()

    async def close(self) -> None:
        await self._crowd.__aexit__(None, None, None)

    async def _move(self, count: int) -> None:
        """Asks for the migration of streams that have tokens, one after the other.

        A stream stays where it is if it ends meanwhile, if no router that answers streams it, or if no other replica
        is ready.
        """
        for _ in range(count):
            if begun := self._crowd.begun:
                moves = await asyncio.to_thread(_move, self.cluster.targets, self._choose.choice(begun))
                self._num_moved += moves

    def _tables(self) -> list[str]:
        figures = self.figures
        lines = ["streams of                  sampled  equal  choices  stopped  calls"]
        lines += [
            f"{each['streams']:3} {name:24} {each['sampled']:6} {each['equal']:6} {each['choices']:8} "
            f"{each['stopped']:8} {each['calls']:6}"
            for name, each in figures["kinds"].items()
        ]
        told = {name: value for name, value in figures.items() if isinstance(value, int)} | figures.get("reading", {})
        return [*lines, "", ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in told.items())]


def _move(targets: Sequence[str], request_id: str) -> bool:
    """Returns whether the stream has moved."""
    for target in targets:
        try:
            with Admin(target) as admin:
                admin.migrate(request_id)
        except (RequestNotFound, Unavailable):
            continue
        except InvalidRequest:
            return False
        return True
    return False


def _count_kinds(outcomes: Sequence[Outcome], verdicts: Sequence[Verdict]) -> dict[str, Counter[str]]:
    """Counts streams by kind. stopped: choices that ended by themselves; calls: of tools."""
    counts: dict[str, Counter[str]] = {}
    for outcome, verdict in sorted(zip(outcomes, verdicts, strict=True), key=lambda pair: pair[0].plan.kind):
        choices = outcome.generation.choices
        counts.setdefault(outcome.plan.kind, Counter()).update(
            streams=1,
            sampled=int(verdict.is_sampled),
            equal=int(not verdict.found),
            choices=len(choices),
            stopped=sum(choice.finish_reason is FinishReason.STOP for choice in choices),
            calls=sum(len(choice.tool_calls) for choice in choices),
        )
    return counts
