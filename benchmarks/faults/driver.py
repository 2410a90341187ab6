"""Injects faults, one after another, into a cluster that works, and reports what became of the work."""

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.faults.crowd import Verdict
from benchmarks.faults.ground import Ground

SUPERVISOR = "octavo up"
_POLL_S = 0.2

Say = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Blow:
    """One injection. victims: names of the processes or links that it hits. may_restart: names of the processes that
    may be replaced by it. verdicts: of streams that are not the traffic's. note: for people. problems: sentences."""

    victims: list[str]
    may_restart: set[str] = field(default_factory=set)
    verdicts: list[Verdict] = field(default_factory=list)
    note: str = ""
    problems: list[str] = field(default_factory=list)


# Injects for some seconds, and returns when the fault is over.
Inject = Callable[[Ground, random.Random, float], Awaitable[Blow]]


def _nothing() -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A kind of fault. seconds: bounds of its length, which is drawn evenly on a logarithmic scale. brief: seconds in
    the short form; None: the short form leaves it out. missing: what this machine lacks for it; empty: nothing.
    needs_weights: of the weight cache on the small disk. num_moves: streams to migrate before it, and during it."""

    name: str
    what: str
    inject: Inject
    seconds: tuple[float, float] = (2.0, 15.0)
    brief: float | None = 0.5
    missing: Callable[[], str] = _nothing
    needs_means: bool = True
    needs_weights: bool = False
    num_moves: int = 0

    def draw_seconds(self, choose: random.Random, longest: float) -> float:
        shortest, most = self.seconds
        most = max(shortest, min(most, longest))
        return shortest * (most / shortest) ** choose.random()


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A fault to inject. number: of all injections."""

    fault: Fault
    number: int
    seconds: float
    seed: str


def injections(faults: Iterable[Fault], seed: int, *, longest: float, brief: bool = False) -> Iterator[Injection]:
    """Draws the lengths. longest: seconds that no fault exceeds. brief: the short form."""
    for number, fault in enumerate(faults):
        own_seed = f"{seed}/{fault.name}/{number}"
        seconds = fault.draw_seconds(random.Random(own_seed), longest)
        if brief:
            assert fault.brief is not None, fault.name
            seconds = fault.brief
        yield Injection(fault=fault, number=number, seconds=seconds, seed=own_seed)


@dataclass(slots=True, kw_only=True)
class Hit:
    """An injection that was made. Times are monotonic seconds. lasted: seconds until all served again. restarted: the
    processes replaced, by name; unexpected: those of them that the fault does not explain. counts: what the traffic
    noted. gaps: for each stream that lived then, the longest time without a token."""

    kind: str
    number: int
    seconds: float
    victims: list[str]
    note: str
    begin: float
    end: float
    restarted: list[str]
    unexpected: list[str]
    problems: list[str]
    verdicts: list[Verdict]
    counts: Counter[str] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)

    @property
    def lasted(self) -> float:
        return self.end - self.begin

    def judge(self, verdicts: Sequence[Verdict]) -> None:
        """Counts the streams that lived while it lasted, by how they ended."""
        lived = [each for each in (*verdicts, *self.verdicts) if each.lived_at(self.begin, self.end)]
        self.gaps = sorted(each.longest_gap(self.begin, self.end) for each in lived)
        self.counts["streams"] = len(lived)
        self.counts["sampled"] = sum(each.is_sampled for each in lived)
        self.counts["lost"] = sum(each.is_lost for each in lived)
        self.counts["twice"] = sum(each.is_duplicated for each in lived)
        self.counts["differ"] = sum(bool(each.found) for each in lived)

    def as_json(self) -> dict[str, Any]:
        names = ("kind", "number", "victims", "note", "restarted", "unexpected", "counts")
        times = {"seconds": round(self.seconds, 2), "lasted": round(self.lasted, 2)}
        return {name: getattr(self, name) for name in names} | times | {"gaps": [round(gap, 2) for gap in self.gaps]}


@dataclass(slots=True, kw_only=True)
class Report:
    """problems: a sentence for each thing that is not as it must be. figures: the traffic's. tables: for people."""

    hits: list[Hit]
    problems: list[str]
    figures: dict[str, Any]
    tables: list[str]

    @property
    def is_clean(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        hits = [hit.as_json() for hit in self.hits]
        return {"clean": self.is_clean, "problems": self.problems, **self.figures, "hits": hits}

    def __str__(self) -> str:
        lines = ["", *(table(self.hits) if self.hits else ()), "", *self.tables, ""]
        return "\n".join(
            [*lines, *(f"WRONG: {each}" for each in self.problems), "" if self.problems else "all is well"]
        )


class Traffic:
    """Work that faults must not harm. Subclasses say what it is, and judge it."""

    def __init__(self, ground: Ground, say: Say) -> None:
        self.ground, self.cluster, self.say = ground, ground.cluster, say
        self.problems: list[str] = []
        self.figures: dict[str, Any] = {}
        self.tables: list[str] = []

    async def begin(self) -> None:
        """Begins the work."""

    async def is_ready(self, injection: Injection, choose: random.Random) -> bool:
        """Waits until the fault may come. Returns False if no more may."""
        return True

    async def go_on(self, fault: Fault, counts: Counter[str]) -> None:
        """Works beside a fault, at whose end it is cancelled. counts: what a report shall say of the fault."""

    async def end(self, hits: Sequence[Hit]) -> None:
        """Ends the work, and fills problems, figures and tables."""

    async def close(self) -> None:
        """Lets go of what the work holds, also after a failure."""


async def run(ground: Ground, traffic: Traffic, drawn: Iterable[Injection], seed: int) -> Report:
    """Begins the traffic, injects the faults when it is ready for each, and ends it."""
    hits: list[Hit] = []
    choose = random.Random(f"{seed}/moments")
    await traffic.begin()
    try:
        for injection in drawn:
            if not await traffic.is_ready(injection, choose):
                break
            hits.append(await _beside(ground, traffic, injection))
        await traffic.end(hits)
    finally:
        await traffic.close()
    problems = [
        f"{hit.kind} {hit.number}: {name} was restarted without need" for hit in hits for name in hit.unexpected
    ]
    problems += [f"{hit.kind} {hit.number}: {text}" for hit in hits for text in hit.problems]
    return Report(hits=hits, problems=problems + traffic.problems, figures=traffic.figures, tables=traffic.tables)


async def _beside(ground: Ground, traffic: Traffic, injection: Injection) -> Hit:
    counts = Counter[str]()
    beside = asyncio.create_task(traffic.go_on(injection.fault, counts))
    try:
        hit = await inject(ground, injection, traffic.say)
    finally:
        beside.cancel()
        (failure,) = await asyncio.gather(beside, return_exceptions=True)
    if isinstance(failure, Exception):
        raise failure
    hit.counts += counts
    return hit


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
    """Injects a fault, and waits until all processes serve again, if the ground is patient."""
    watch = ProcessWatch(ground)
    watching = asyncio.create_task(watch.run())
    begin = time.monotonic()
    try:
        blow = await injection.fault.inject(ground, random.Random(injection.seed), injection.seconds)
        over = time.monotonic()
        if ground.is_patient:
            await ground.wait_until_serving(injection.fault.name)
        end = time.monotonic()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    watch.look()
    restarted = watch.restarted
    say(
        f"{injection.fault.name} {injection.number}: {', '.join(blow.victims)}, {over - begin:.1f} s"
        f"{', ' + blow.note if blow.note else ''}"
        f"{f'; serves again after {end - over:.1f} s' if ground.is_patient else ''}"
        f"{'; restarted: ' + ', '.join(restarted) if restarted else ''}"
    )
    return Hit(
        kind=injection.fault.name,
        number=injection.number,
        seconds=injection.seconds,
        victims=blow.victims,
        note=blow.note,
        begin=begin,
        end=end,
        restarted=restarted,
        unexpected=[name for name in restarted if name not in blow.may_restart],
        problems=[*blow.problems, *(text for each in blow.verdicts for text in each.found)],
        verdicts=blow.verdicts,
    )


def table(hits: Sequence[Hit]) -> list[str]:
    """A row a kind, and a row of totals. Streams count once for each fault that they lived through."""
    head = "fault                       times  lasted p50, max (s)"
    streams = "  streams  sampled  lost  twice  differ  tokenless p50, max (s)"
    has_streams = any("streams" in hit.counts for hit in hits)
    kinds = dict.fromkeys(hit.kind for hit in hits)
    rows = [_row(kind, [hit for hit in hits if hit.kind == kind], has_streams=has_streams) for kind in kinds]
    return [
        f"{head}{streams * has_streams}  restarted",
        *rows,
        _row(f"all {len(kinds)} kinds", hits, has_streams=has_streams),
    ]


def _row(name: str, hits: Sequence[Hit], *, has_streams: bool) -> str:
    row = f"{name:27} {len(hits):5} {_spread(each.lasted for each in hits):>20}"
    if has_streams:
        streams, sampled, lost, twice, differ = (
            sum(hit.counts[what] for hit in hits) for what in ("streams", "sampled", "lost", "twice", "differ")
        )
        gaps = _spread(gap for hit in hits for gap in hit.gaps)
        row += f" {streams:8} {sampled:8} {lost:5} {twice:6} {differ:7} {gaps:>22}"
    restarted = Counter(name.rstrip("0123456789.").strip() for hit in hits for name in hit.restarted)
    shown = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in restarted.items())
    return f"{row}  {shown or 'nothing'}"


def _spread(values: Iterable[float]) -> str:
    values = list(values)
    return f"{statistics.median(values):.1f}, {max(values):.1f}" if values else "-"
