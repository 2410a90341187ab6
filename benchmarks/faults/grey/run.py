"""Injects faults, one after another, while streams run, and compares each stream with its undisturbed run."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from typing import Any

from benchmarks.faults.command import Say
from benchmarks.faults.crowd import Crowd, Outcome, Plan
from benchmarks.faults.grey.clients import undisturbed
from benchmarks.faults.grey.fault import SUPERVISOR, Blow, Fault
from benchmarks.faults.grey.ground import Ground
from benchmarks.faults.grey.verdict import Verdict, gaps, judge, now
from octavo.client.admin import Admin

# Streams that live when a fault begins, and the fewest while it lasts.
_NUM_LIVE, _FEWEST_LIVE = 5, 3
# Streams that start during one fault, at most.
_MOST_MORE = 6
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A fault to inject. number: of this kind's injections."""

    fault: Fault
    number: int
    seconds: float
    seed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The effect of one injection. gaps: each live stream's longest time without a token. restarted: the
    processes replaced, by name; unexpected: those of them that the fault does not explain. lasted: seconds until all
    served again. found: how streams differ."""

    kind: str
    number: int
    seconds: float
    victims: list[str]
    note: str
    num_streams: int
    num_sampled: int
    num_lost: int
    num_duplicated: int
    num_different: int
    gaps: list[float]
    restarted: list[str]
    unexpected: list[str]
    lasted: float
    found: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.num_lost or self.num_duplicated or self.num_different or self.unexpected)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """An injection that was made. begin, end: see now(). restarted: the processes replaced, by name."""

    injection: Injection
    blow: Blow
    begin: float
    end: float
    restarted: list[str]

    @property
    def unexpected(self) -> list[str]:
        """The processes that were replaced although the fault does not explain it."""
        return [name for name in self.restarted if name not in self.blow.may_restart]


def injections(
    faults: Sequence[Fault], times: int, seed: int, *, longest: float, brief: bool = False
) -> list[Injection]:
    """Draws the lengths. longest: seconds that no fault exceeds. brief: the short form."""
    drawn = []
    for fault in faults:
        for number in range(times):
            own_seed = f"{seed}/{fault.name}/{number}"
            seconds = fault.draw_seconds(random.Random(own_seed), longest)
            if brief:
                assert fault.brief is not None, fault.name
                seconds = fault.brief
            drawn.append(Injection(fault=fault, number=number, seconds=seconds, seed=own_seed))
    return drawn


class ProcessWatch:
    """Notes each process that takes the place of another one."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._seen = self._pids()
        # Names, once for each time.
        self.restarted: list[str] = []

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            self.look()

    def look(self) -> None:
        for name, pid in self._pids().items():
            if self._seen.get(name, pid) != pid:
                self.restarted.append(name)
            self._seen[name] = pid

    def _pids(self) -> dict[str, int]:
        pids = {str(place): process.pid for place, process in self._ground.cluster.processes().items()}
        return pids | {SUPERVISOR: self._ground.cluster.up.process.pid}


async def inject(ground: Ground, injection: Injection, say: Say) -> Hit:
    """Injects a fault, and waits until all processes serve again."""
    watch = ProcessWatch(ground)
    watching = asyncio.create_task(watch.run())
    begin = now()
    try:
        blow = await injection.fault.inject(ground, random.Random(injection.seed), injection.seconds)
        over = now()
        await ground.wait_until_serving(injection.fault.name)
        end = now()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    watch.look()
    restarted = watch.restarted
    say(
        f"{injection.fault.name} {injection.number}: {', '.join(blow.victims)}, {over - begin:.1f} s"
        f"{', ' + blow.note if blow.note else ''}; serves again after {end - over:.1f} s"
        f"{'; restarted: ' + ', '.join(restarted) if restarted else ''}"
    )
    return Hit(injection=injection, blow=blow, begin=begin, end=end, restarted=restarted)


class Streams:
    """Plans, taken in turn, and the undisturbed outcomes of those that have a seed."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._plans = cycle(plans)
        self._expected: dict[int, Outcome] = {}

    def start(self, crowd: Crowd, count: int) -> None:
        for _ in range(count):
            crowd.add(next(plan for plan in self._plans if not crowd.is_live(plan.number)))

    async def judge(self, targets: Sequence[str], outcomes: Sequence[Outcome], began: float) -> list[Verdict]:
        """Compares outcomes with undisturbed ones, which it asks for as far as it has none yet."""
        # They must not reuse KV blocks that were computed during the faults.
        await asyncio.to_thread(_forget_prefixes, targets[0])
        unknown = [each for each in outcomes if each.plan.number not in self._expected]
        asked = dict(zip(map(id, unknown), await undisturbed(targets, unknown), strict=True))
        self._expected |= {each.plan.number: asked[id(each)] for each in unknown if each.plan.has_seed}
        return [
            judge(each, asked.get(id(each)) or self._expected[each.plan.number], crowd_began=began) for each in outcomes
        ]


class Runner:
    """Injects faults into one cluster."""

    def __init__(self, ground: Ground, streams: Streams, say: Say) -> None:
        self._ground, self._streams, self._say = ground, streams, say
        self._targets = ground.cluster.targets

    async def run(self, drawn: Sequence[Injection]) -> list[Result]:
        """Injects the faults, lets the streams end, and compares them."""
        async with Crowd(self._targets, []) as crowd:
            hits = [await self._inject(crowd, injection) for injection in drawn]
            outcomes = await crowd.finish()
            began = crowd.began
        verdicts = await self._streams.judge(self._targets, outcomes, began)
        return [_result(hit, [*verdicts, *hit.blow.verdicts]) for hit in hits]

    async def _inject(self, crowd: Crowd, injection: Injection) -> Hit:
        self._streams.start(crowd, _NUM_LIVE - crowd.num_live)
        # Three lost workers in a row without progress in between would be blamed on a stream.
        await crowd.all_advance()
        beside = asyncio.create_task(self._keep_busy(crowd))
        try:
            return await inject(self._ground, injection, self._say)
        finally:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)

    async def _keep_busy(self, crowd: Crowd) -> None:
        for _ in range(_MOST_MORE):
            await crowd.fewer_live(_FEWEST_LIVE)
            self._streams.start(crowd, 1)


def _result(hit: Hit, verdicts: Sequence[Verdict]) -> Result:
    lived = [each for each in verdicts if each.lived_at(hit.begin, hit.end)]
    return Result(
        kind=hit.injection.fault.name,
        number=hit.injection.number,
        seconds=round(hit.injection.seconds, 2),
        victims=hit.blow.victims,
        note=hit.blow.note,
        num_streams=len(lived),
        num_sampled=sum(each.is_sampled for each in lived),
        num_lost=sum(each.is_lost for each in lived),
        num_duplicated=sum(each.is_duplicated for each in lived),
        num_different=sum(bool(each.found) for each in lived),
        gaps=[round(gap, 2) for gap in gaps(lived, hit.begin, hit.end)],
        restarted=hit.restarted,
        unexpected=hit.unexpected,
        lasted=round(hit.end - hit.begin, 2),
        found=[text for each in lived for text in each.found],
    )


def _forget_prefixes(target: str) -> None:
    with Admin(target) as admin:
        admin.reset_prefix_cache()
