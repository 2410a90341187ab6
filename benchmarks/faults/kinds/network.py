"""Broken networks between routers, schedulers and workers, by relays through which their tcp connections go."""

import asyncio
import functools
import random
import time
from collections.abc import Callable

from benchmarks.faults.cluster import until
from benchmarks.faults.driver import Blow, Fault
from benchmarks.faults.ground import Ground
from benchmarks.faults.means.relay import Relay, Way, pause_evenly, pause_now_and_then

_DELAY_S = (0.02, 0.1)
# The chance of a pause a chunk, and the pause: TCP waits 0.2 s before it sends again, then twice as long.
_LOSS_CHANCE, _LOSS_S = 0.05, (0.2, 0.8)
_RESET_INTERVAL_S = 1.5

# Chooses the relays of one link.
Choose = Callable[[Ground, random.Random], tuple[str, list[Relay]]]


def _router_link(ground: Ground, choose: random.Random) -> tuple[str, list[Relay]]:
    replica = choose.randrange(ground.cluster.options.data_parallel_size)
    return f"routers to scheduler {replica}", [ground.means.router_links[replica]]


def _worker_link(ground: Ground, choose: random.Random) -> tuple[str, list[Relay]]:
    """The connections for plans and for heartbeats, both: they take the same way."""
    replica = choose.randrange(ground.cluster.options.data_parallel_size)
    return f"workers to scheduler {replica}", list(ground.means.worker_links[replica])


async def _delay(link: Choose, ground: Ground, choose: random.Random, seconds: float) -> Blow:
    return await _paused(link, pause_evenly(choose, *_DELAY_S), ground, choose, seconds)


async def _lose(link: Choose, ground: Ground, choose: random.Random, seconds: float) -> Blow:
    return await _paused(link, pause_now_and_then(choose, _LOSS_CHANCE, *_LOSS_S), ground, choose, seconds)


async def _paused(
    link: Choose, pause: Callable[[], float], ground: Ground, choose: random.Random, seconds: float
) -> Blow:
    name, relays = link(ground, choose)
    ways = [way for relay in relays for way in (relay.to_listener, relay.to_dialer)]
    for way in ways:
        way.pause = pause
    await asyncio.sleep(seconds)
    _release(ground, ways)
    return Blow(victims=[name])


async def _partition(link: Choose, ground: Ground, choose: random.Random, seconds: float) -> Blow:
    """Lets nothing pass in one direction."""
    name, relays = link(ground, choose)
    to_listener = choose.random() < 0.5
    ways = [relay.to_listener if to_listener else relay.to_dialer for relay in relays]
    for way in ways:
        ground.means.relays.call(way.hold)
    await asyncio.sleep(seconds)
    _release(ground, ways)
    return Blow(victims=[name], note=f"nothing passes {'to' if to_listener else 'from'} the scheduler")


def _release(ground: Ground, ways: list[Way]) -> None:
    for way in ways:
        ground.means.relays.call(way.release)


async def _reset(link: Choose, ground: Ground, choose: random.Random, seconds: float) -> Blow:
    name, relays = link(ground, choose)
    ends, count = time.monotonic() + seconds, 0
    while count == 0 or time.monotonic() < ends:
        for relay in relays:
            ground.means.relays.call(relay.reset)
        count += 1
        await asyncio.sleep(min(_RESET_INTERVAL_S, seconds))
    return Blow(victims=[name], note=f"{count} times")


async def _half_open(link: Choose, ground: Ground, choose: random.Random, seconds: float) -> Blow:
    """Takes one side of each connection away without a word to the other, until the other has noticed."""
    name, relays = link(ground, choose)
    keep_dialer = choose.random() < 0.5
    began = time.monotonic()
    for relay in relays:
        ground.means.relays.call(functools.partial(relay.forget_one_side, keep_dialer=keep_dialer))
    await asyncio.sleep(0.1)

    async def have_noticed() -> bool:
        return not any(relay.num_half_open for relay in relays)

    await until(have_noticed, f"the end of half-open connections, {name}")
    gone = "scheduler's" if keep_dialer else "other"
    return Blow(victims=[name], note=f"the {gone} side is gone, noticed after {time.monotonic() - began:.0f} s")


_LINKS = {"router": (_router_link, "routers and a scheduler"), "worker": (_worker_link, "a scheduler and its workers")}
_KINDS = {
    "delay": (_delay, "bytes take 20 to 100 ms longer", (2.0, 20.0), 0.5),
    "loss": (_lose, "packets are lost: stalls of 0.2 to 0.8 s", (2.0, 20.0), 0.5),
    "partition": (_partition, "nothing passes in one direction", (2.0, 15.0), 1.0),
    "reset": (_reset, "connections are reset each 1.5 s", (1.0, 6.0), 0.1),
    # As long as the other side takes to notice.
    "half-open": (_half_open, "one side of each connection is gone", (1.0, 1.0), None),
}

FAULTS = [
    Fault(
        name=f"net-{kind}-{link}",
        what=f"{what}, between {between}",
        inject=functools.partial(inject, choose),
        seconds=seconds,
        brief=brief,
    )
    for kind, (inject, what, seconds, brief) in _KINDS.items()
    for link, (choose, between) in _LINKS.items()
]
