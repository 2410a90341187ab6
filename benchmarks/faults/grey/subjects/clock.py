"""The wall clock of the whole cluster, set back and forth."""

import asyncio
import random

from benchmarks.faults.cluster import Kind
from benchmarks.faults.grey.fault import Blow, Fault
from benchmarks.faults.grey.ground import Ground
from benchmarks.faults.grey.means.fake_clock import why_no_clock

_JUMPS_S = (90, 3600, 86_400)


async def _jump(ground: Ground, choose: random.Random, seconds: float) -> Blow:
    """Sets the clock once to one side, once to the other, then right again."""
    jump = choose.choice(_JUMPS_S) * choose.choice((-1, 1))
    for offset in (jump, -jump):
        ground.clock.set_to(offset)
        await asyncio.sleep(seconds / 2)
    ground.clock.set_to(0)
    return Blow(victims=["all processes"], note=f"by {jump:+} s, then {-jump:+} s")


async def _jump_back_and_kill(ground: Ground, choose: random.Random, seconds: float) -> Blow:
    """Kills a scheduler while the clock is back: what its successor begins is older than what workers have seen."""
    jump = -choose.choice(_JUMPS_S)
    ground.clock.set_to(jump)
    place = choose.choice(ground.cluster.places(Kind.SCHEDULER))
    ground.cluster.kill([place])
    await ground.wait_until_serving(f"a kill of {place} at {jump:+} s")
    ground.clock.set_to(0)
    return Blow(victims=[str(place)], may_restart={str(place)}, note=f"by {jump:+} s")


FAULTS = [
    Fault(name="clock", what="the wall clock is set back and forth", inject=_jump, missing=why_no_clock),
    Fault(
        name="clock-back-kill",
        what="the wall clock is set back, and a scheduler is killed",
        inject=_jump_back_and_kill,
        brief=None,
        missing=why_no_clock,
    ),
]
