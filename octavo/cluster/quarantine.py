"""Decides what becomes of a part of a cluster whose processes fail again and again: it is stopped for a while, and the
rest goes on."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from configs.options import Options
from octavo.cluster.errors import ProcessFailed
from octavo.cluster.processes import ProcessSpec, Unit
from runtime.telemetry.quarantine import QuarantineNote

# Deaths within this time count as a row, and a unit that has run for it without one is well.
RESTART_WINDOW = 60.0
# Seconds of the first quarantine; each one in a row lasts twice as long as the one before.
_FIRST_S = 60.0


@dataclass(slots=True)
class _State:
    is_free: asyncio.Event = field(default_factory=asyncio.Event)
    # It has not served since it was last in quarantine.
    is_on_trial: bool = False
    # It has served at any time.
    has_served: bool = False
    # Since when it runs without a death, on time.monotonic().
    since: float = field(default_factory=time.monotonic)
    # Seconds of the last quarantine, and when it ended.
    seconds: float = 0.0
    released: float = 0.0
    count: int = 0
    until: float = 0.0
    cause: str = ""

    @property
    def is_left(self) -> bool:
        return self.is_free.is_set() and not self.is_on_trial


class Quarantine:
    """Units that are stopped for a while. Until anything has served, a failure is taken for a mistake in the options,
    which ends the cluster at once; so does the failure of the last router."""

    def __init__(
        self,
        units: Collection[Unit],
        *,
        no_replica_timeout: float,
        max_quarantine: float,
        on_change: Callable[[Mapping[int, QuarantineNote]], None] = lambda notes: None,
    ) -> None:
        """no_replica_timeout, max_quarantine: the options. on_change: called with the notes of all replicas that were
        ever in quarantine, by number."""
        self._units = {unit: _State() for unit in units}
        for state in self._units.values():
            state.is_free.set()
        self._no_replica_timeout, self._max_seconds = no_replica_timeout, max_quarantine
        self._on_change = on_change
        self._has_served = False
        # Since when no replica has been left, on time.monotonic().
        self._none_since: float | None = None
        self._last_cause = ""

    def is_in(self, unit: Unit | None) -> bool:
        return unit is not None and not self._units[unit].is_free.is_set()

    async def released(self, unit: Unit) -> None:
        """Waits until a unit is not in quarantine."""
        await self._units[unit].is_free.wait()

    def is_watched(self, unit: Unit) -> bool:
        """Returns True if it is not known yet whether a unit serves: `note_health` says so."""
        state = self._units[unit]
        return state.is_free.is_set() and (state.is_on_trial or not state.has_served)

    def note_serving(self) -> None:
        """Notes that a router serves: some replica is well."""
        self._has_served = True

    def note_health(self, unit: Unit, well: bool | None, now: float) -> None:
        """Takes a look at a unit that runs. well: all its processes say by /health that they are; None: they have no
        /health, so that only time can tell. now: on time.monotonic()."""
        state = self._units[unit]
        if well is None:
            well = now - state.since > RESTART_WINDOW
        if not well or not state.is_free.is_set():
            return
        state.has_served, state.is_on_trial = True, False
        if unit.replicas:
            self._has_served = True
            self._none_since = None

    def note_death(self, unit: Unit | None, now: float) -> None:
        """Notes that a process of a unit has died, and is started again."""
        if unit is not None:
            self._units[unit].since = now

    def put(self, unit: Unit, cause: str, now: float) -> float:
        """Puts a unit in quarantine, and returns for how many seconds. cause: its first line tells what ended.

        Raises ProcessFailed if the cluster ends instead.
        """
        state = self._units[unit]
        alike = [other for kind, other in self._units.items() if bool(kind.replicas) == bool(unit.replicas)]
        none_left = not any(other.is_left for other in alike if other is not state)
        if not self._has_served or (none_left and not any(other.has_served for other in alike)):
            raise ProcessFailed(cause)
        if none_left and not unit.replicas:
            raise ProcessFailed(f"{cause}\nNo other router is left.")
        # One that has run for longer than it was stopped begins anew.
        in_a_row = state.count and now - state.released <= max(state.seconds, RESTART_WINDOW)
        state.seconds = min(2 * state.seconds if in_a_row else _FIRST_S, self._max_seconds)
        state.is_free.clear()
        state.count += 1
        state.until = time.time() + state.seconds
        state.cause = cause.partition("\n")[0].removesuffix(" Its last words:")
        self._last_cause = cause
        if none_left and self._none_since is None:
            self._none_since = now
        self.check(0.0)
        self._tell()
        return state.seconds

    def release(self, unit: Unit, now: float) -> None:
        """Lets a unit try again."""
        state = self._units[unit]
        state.released = state.since = now
        state.until, state.is_on_trial = 0.0, True
        state.is_free.set()
        self._tell()

    @property
    def none_since(self) -> float | None:
        """Since when no replica has been left, on time.monotonic(); None: some are."""
        return self._none_since

    def check(self, seconds: float) -> None:
        """Raises ProcessFailed if no replica has been left for too long. seconds: since `none_since`."""
        if self._none_since is not None and seconds >= self._no_replica_timeout:
            raise ProcessFailed(
                f"{self._last_cause}\nNo replica has been left for {seconds:.0f} s "
                f"(no_replica_timeout={self._no_replica_timeout:g})."
            )

    def _tell(self) -> None:
        self._on_change(
            {
                replica: QuarantineNote(count=state.count, until=state.until, cause=state.cause)
                for unit, state in self._units.items()
                for replica in unit.replicas
                if state.count
            }
        )


def quarantine_text(spec: ProcessSpec, cause: str, seconds: float) -> str:
    """Tells people, after the name of the process that failed, that its unit is stopped."""
    assert spec.unit is not None
    reason = cause.removeprefix(f"{spec.name} ")
    return f"{reason}\n{spec.unit.name} is in quarantine: its processes are stopped, and tried again in {seconds:g} s"


def released_text(unit: Unit) -> str:
    """Tells people, after the name of the process that failed, that its unit is tried again."""
    return f"is started again after a quarantine, with all of {unit.name}"


def quarantine_of(
    options: Options, specs: Collection[ProcessSpec], on_change: Callable[[Mapping[int, QuarantineNote]], None]
) -> Quarantine:
    """Returns that of a cluster's processes."""
    return Quarantine(
        {spec.unit for spec in specs if spec.unit is not None},
        no_replica_timeout=options.no_replica_timeout,
        max_quarantine=options.max_quarantine,
        on_change=on_change,
    )
