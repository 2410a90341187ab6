"""Finds replicas that are slow, not dead, and keeps requests from them, after Envoy's outlier detection.

A replica is compared with the others of its fingerprint: by the median of its steps' times over a window, normalized by
their sizes (step_times.py). Far slower, it gets fewer requests; beyond a second bound it gets none for a growing time,
and its streams go elsewhere. Then a few requests probe it. Pure: time is an input, in seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from statistics import median_low

from protos.scheduler_pb2 import Load
from router.replicas.health.step_times import SAMPLES_A_WINDOW, StepTimes, slowness

# With only one other replica to compare with, nobody knows which of the two is unusual: the bounds are twice as high.
_WITH_ONE_OTHER = 2.0
# Samples in a row after which a replica must have looked slow. When all slow down together, with their machine or with
# their load, the samples of one show it before those of the others do.
_SLOW_IN_A_ROW = 3
# A comparison with more replicas than this costs more and says nothing new.
_MOST_COMPARED = 32
# Sequences that may be at a replica on probation, from all routers.
_MOST_PROBES = 4
# The first time without requests, the longest, and the time at full pace after which the next one is the first again,
# all in windows. 30 s and 300 s by default, as in Envoy.
_FIRST_LEFT_OUT, _LONGEST_LEFT_OUT, _FORGET = 3, 30, 30
# A replica takes the place of another one in the share only if it is this many times slower.
_MUCH_SLOWER = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceSettings:
    """Options of the router, slow_replica_*."""

    # Times as slow as the others. 0: never. The second is not below the first.
    slow_factor: float = 0.0
    handover_factor: float = 0.0
    # Share of the replicas that may be treated as slow; always at least one.
    max_share: float = 0.34
    window: float = 10.0


class State(IntEnum):
    """The states of a replica's pace, with their numbers in the metric."""

    FULL = 0
    # Gets one request in `Pace.one_in`.
    SLOW = 1
    # Gets none, and its streams go elsewhere.
    LEFT_OUT = 2
    # Gets a few requests at a time.
    PROBED = 3


class Pace:
    """The pace of one replica, and what it may be given. Begins at full pace."""

    def __init__(self, settings: PaceSettings, all_paces: list["Pace"]) -> None:
        """all_paces: those of all replicas of the router; adds itself."""
        self.state = State.FULL
        # How many times slower than the others it was found to be; 1 if never.
        self.slowness = 1.0
        self._settings = settings
        self._all, self._index = all_paces, len(all_paces)
        all_paces.append(self)
        self._times = StepTimes(settings.window)
        # The model's; empty while there is no Session.
        self._fingerprint = ""
        self._turn = 0
        # Samples after which it looked slow, and too slow, since the last one after which it did not.
        self._num_slow = self._num_too_slow = 0
        self._left_out_until = self._left_out_s = 0.0
        self._full_since = 0.0

    @property
    def interval(self) -> float:
        """Seconds between two Loads that it needs at most, to begin and end its samples in time."""
        return self._settings.window / SAMPLES_A_WINDOW / 4

    @property
    def one_in(self) -> int:
        """How many choices there are for each that it takes part in, while it is SLOW."""
        return max(2, round(self.slowness))

    # --- What may be sent

    def takes(self, num_sequences: int) -> bool:
        """Returns True if it takes part in the choice of a replica for a request; counts the choice.

        num_sequences: those that it has.
        """
        if self.state is State.SLOW:
            self._turn += 1
            return self._turn % self.one_in == 0
        if self.state is State.PROBED:
            return num_sequences < _MOST_PROBES
        return self.state is State.FULL

    def describe(self, now: float) -> str:
        """Describes its state for people; empty at full pace."""
        if self.state is State.FULL:
            return ""
        cause = f"its steps take {self.slowness:.1f} times as long as elsewhere"
        if self.state is State.SLOW:
            return f"it gets 1 request in {self.one_in}: {cause}"
        if self.state is State.LEFT_OUT:
            return f"left out for {max(self._left_out_until - now, 0):.0f} s more: {cause}"
        return f"gets {_MOST_PROBES} requests at a time, to see if it is still slow: {cause}"

    # --- What is known

    def begin(self, now: float, fingerprint: str, load: Load) -> None:
        """Notes a Session or an epoch that begins. Steps so far say nothing about new workers, which are probed at
        once if the old ones were left out."""
        self._fingerprint = fingerprint
        self._times.restart(now, load)
        self._left_out_until = min(self._left_out_until, now)

    def end(self) -> None:
        """Notes that there is no Session."""
        self._fingerprint = ""

    def note(self, now: float, load: Load) -> bool:
        """Takes in a Load. Returns True if that changes the state of this replica, or of another one."""
        if not self._settings.slow_factor:
            return False
        if self.state is State.LEFT_OUT:
            if now < self._left_out_until:
                return False
            self.state = State.PROBED
            self._times.restart(now, load)
            return True
        if not self._times.note(now, load):
            return False
        samples = self._times.samples(now)
        found = [slowness(samples, typical) for typical in self._compared(now)] if samples else []
        if not found:
            return False
        self.slowness = median_low(found)
        scale = _WITH_ONE_OTHER if len(found) == 1 else 1.0
        slow_factor, handover_factor = scale * self._settings.slow_factor, scale * self._settings.handover_factor
        self._num_slow = self._num_slow + 1 if self.slowness >= slow_factor else 0
        self._num_too_slow = self._num_too_slow + 1 if self.slowness >= handover_factor > 0 else 0
        return self._judge(now, load)

    def _compared(self, now: float) -> Iterator:
        """Returns the typical steps of others with the same fingerprint, in the order of their numbers from its own."""
        others = self._all[self._index + 1 :] + self._all[: self._index]
        alike = (
            typical
            for other in others
            if other._fingerprint == self._fingerprint and other.state in (State.FULL, State.SLOW)
            if (typical := other._times.typical(now)) is not None
        )
        return islice(alike, _MOST_COMPARED)

    def _judge(self, now: float, load: Load) -> bool:
        """Returns True if the state changes."""
        before = self.state
        if self._num_slow >= _SLOW_IN_A_ROW:
            if before is State.PROBED:
                self._leave_out(now)
            elif before is State.SLOW or self._takes_place(now):
                self.state = State.SLOW
                if self._num_too_slow >= _SLOW_IN_A_ROW:
                    self._leave_out(now)
        elif before is State.PROBED and not self._num_slow:
            # It gets more than probes, and is judged anew by what it does with them.
            self.state = State.SLOW
            self._times.restart(now, load)
        elif before is State.SLOW and self.slowness < (1 + self._settings.slow_factor) / 2:
            self._return(now)
        return self.state is not before

    def _leave_out(self, now: float) -> None:
        window = self._settings.window
        if self._left_out_s and self._full_since and now - self._full_since > _FORGET * window:
            self._left_out_s = 0.0
        self._left_out_s = min(max(2 * self._left_out_s, _FIRST_LEFT_OUT * window), _LONGEST_LEFT_OUT * window)
        self._left_out_until, self._full_since = now + self._left_out_s, 0.0
        self.state = State.LEFT_OUT
        self._num_slow = self._num_too_slow = 0

    def _return(self, now: float) -> None:
        self.state, self._full_since = State.FULL, now

    def _takes_place(self, now: float) -> bool:
        """Returns True if one more replica may be slow; a much milder case makes way if need be."""
        num_present = sum(bool(each._fingerprint) for each in self._all)
        unusual = [each for each in self._all if each.state is not State.FULL]
        if len(unusual) < max(1, int(self._settings.max_share * num_present)):
            return True
        mild = [each for each in unusual if each.state is State.SLOW]
        mildest = min(mild, key=lambda each: each.slowness, default=None)
        if mildest is None or self.slowness < _MUCH_SLOWER * mildest.slowness:
            return False
        mildest._return(now)
        return True
