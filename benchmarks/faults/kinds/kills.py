"""Processes killed with -9, one or two at once, and a rank in the middle of a step."""

import asyncio
import functools
import random
import time
from collections.abc import Sequence

from benchmarks.faults.cluster import Cluster, Kind, Place
from benchmarks.faults.driver import Blow, Fault
from benchmarks.faults.ground import Ground

# One kill in four takes two processes at once.
_DOUBLES_OF = 4
# The first pair leaves no replica at all.
_PAIRS = (
    (Kind.SCHEDULER, Kind.SCHEDULER),
    (Kind.WORKER, Kind.SCHEDULER),
    (Kind.ROUTER, Kind.ROUTER),
    (Kind.SCHEDULER, Kind.ROUTER),
    (Kind.WORKER, Kind.ROUTER),
    (Kind.WORKER, Kind.WORKER),
)
# Before each kill, and again while its victims are away.
_NUM_MOVES = 2
# Seconds within which the other ranks leave the step of one that is killed.
_MOST_SECONDS = 5.0
_LEFT, _READY, _CAUSE = " is over: ", "ready for epoch", " has ended: "


def choose_kills(num_kills: int, choose: random.Random) -> list[Fault]:
    """Returns kills in random order: a quarter of them, at least one, take two processes; the others take each kind of
    process in turn.

    With 20 kills, each kind dies five times alone; with three, one takes both schedulers, one a worker, one a router.
    """
    num_doubles = max(num_kills // _DOUBLES_OF, 1)
    kinds: list[tuple[Kind, ...]] = [_PAIRS[i % len(_PAIRS)] for i in range(num_doubles)]
    # Kinds that are in no pair come first.
    singles = sorted(Kind, key=lambda kind: any(kind in pair for pair in kinds))
    kinds += [(singles[i % len(singles)],) for i in range(num_kills - num_doubles)]
    choose.shuffle(kinds)
    return [KILLS[each] for each in kinds[:num_kills]]


def choose_victims(ground: Ground, kinds: Sequence[Kind], choose: random.Random) -> list[Place]:
    """Chooses a different process for each of the kinds, as far as there are any that are not spared."""
    victims: list[Place] = []
    for kind in kinds:
        places = [place for place in ground.cluster.places(kind) if place not in {*victims, *ground.spared}]
        victims += [choose.choice(places)] if places else []
    return victims


async def _kill(kinds: Sequence[Kind], ground: Ground, choose: random.Random, seconds: float) -> Blow:
    victims = choose_victims(ground, kinds, choose)
    if ground.is_patient:
        await ground.cluster.kill_and_wait(victims)
    else:
        # Some may not be back from an earlier kill.
        victims = [place for place in victims if place in ground.cluster.processes()]
        await asyncio.to_thread(ground.cluster.kill, victims)
    names = [str(place) for place in victims]
    return Blow(victims=names, may_restart=set(names))


async def _kill_rank(ground: Ground, choose: random.Random, seconds: float) -> Blow:
    """Kills a rank for which another one waits in each step: any of one stage, else one that is not of the last."""
    return await asyncio.to_thread(_lose_rank, ground.cluster, choose)


def _lose_rank(cluster: Cluster, choose: random.Random) -> Blow:
    options, up = cluster.options, cluster.up
    num_ranks, tensor = options.world_size, options.tensor_parallel_size
    assert num_ranks > 1, "a replica of one rank has no other one that could wait for it"
    waited_for = num_ranks if num_ranks == tensor else num_ranks - tensor
    victim = Place(Kind.WORKER, choose.randrange(options.data_parallel_size), choose.randrange(waited_for))
    num_lines = len(up.lines)
    num_left, num_ready = (sum(words in line for line in up.lines) for words in (_LEFT, _READY))
    process = cluster.processes()[victim]
    began = time.monotonic()
    process.kill()
    up.wait_for(_LEFT, count=num_left + num_ranks - 1)
    left_s = time.monotonic() - began
    up.wait_for(_READY, count=num_ready + num_ranks)
    ready_s = time.monotonic() - began
    causes = [
        line.partition(_CAUSE)[2].removesuffix(f" process=scheduler-{victim.number}")
        for line in up.lines[num_lines:]
        if _CAUSE in line
    ]
    return Blow(
        victims=[str(victim)],
        may_restart={str(victim)},
        note=f"the others left within {left_s:.2f} s, ready again after {ready_s:.1f} s: {'; '.join(causes)}",
        problems=[f"the others took {left_s:.1f} s to leave its step"] * (left_s > _MOST_SECONDS),
    )


KILLS: dict[tuple[Kind, ...], Fault] = {
    kinds: Fault(
        name=f"kill-{'-'.join(kinds)}",
        what=f"{' and '.join(f'a {kind}' for kind in kinds)} {'is' if len(kinds) == 1 else 'are'} killed",
        inject=functools.partial(_kill, kinds),
        brief=None,
        needs_means=False,
        num_moves=_NUM_MOVES,
    )
    for kinds in (*((kind,) for kind in Kind), *_PAIRS)
}
FAULTS = [
    *KILLS.values(),
    Fault(
        name="rank",
        what="a rank of several is killed in the middle of a step",
        inject=_kill_rank,
        brief=None,
        needs_means=False,
    ),
]
