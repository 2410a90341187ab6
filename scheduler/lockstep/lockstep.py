"""Replicas that compute their steps together: when a wave of steps begins and ends, and what the step loop knows
of it.
"""

from collections import deque
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

import zmq

from configs.options import Options
from scheduler.core.messages import Plan
from scheduler.lockstep.coordinator import Coordinator
from scheduler.lockstep.member import Member
from scheduler.ranks.epochs import Event
from scheduler.ranks.step_wire import ResultError
from scheduler.ranks.workers import Workers
from scheduler.sockets import InvalidMessages


class WaveError(RuntimeError):
    """Replicas disagree about which steps belong to a wave: one of them has not kept to the rule."""


class Waves:
    """The waves of one replica, in one epoch. Steps are numbered from 1."""

    def __init__(self, max_steps_in_flight: int) -> None:
        """max_steps_in_flight: the same in all replicas."""
        self._max_steps_in_flight = max_steps_in_flight
        # The latest wave's first step, and the first one after it; None: its end is not known yet.
        self._first = 0
        self._end: int | None = 1
        # Where the next one begins, if others have come to the end of this one before.
        self._next = 0
        self._num_empty = 0
        self.num_begun = 0

    def holds(self, step: int) -> bool:
        """True if the next step to be sent belongs to a wave: then it has to be sent, empty if need be."""
        return self._first <= step and (self._end is None or step < self._end)

    def announce(self, first_step: int) -> None:
        """The coordinator says where the latest wave begins, and may say so again; 0: there was none. Raises
        WaveError."""
        if first_step <= self._first:
            return
        self._next = first_step
        if self._end is not None:
            self._begin_next(self._end)

    def note_result(self, step: int, num_tokens: int) -> None:
        """A step has returned; they do so in order. num_tokens: of all replicas. Raises WaveError."""
        if self._end is not None or step < self._first:
            return
        self._num_empty = 0 if num_tokens else self._num_empty + 1
        if self._num_empty == self._max_steps_in_flight:
            self._end = step + self._max_steps_in_flight
            if self._next:
                self._begin_next(self._end)

    def _begin_next(self, end: int) -> None:
        if self._next != end:
            raise WaveError(f"a wave is to begin at step {self._next}, but the one before ends before step {end}")
        self._first, self._end, self._next = end, None, 0
        self._num_empty = 0
        self.num_begun += 1


class Lockstep:
    """One scheduler's part; that of replica 0 has the coordinator. Steps are numbered from 1 in each epoch."""

    def __init__(
        self,
        stack: ExitStack,
        context: zmq.Context,
        options: Options,
        replica: int,
        curve_dir: Path | None,
        workers: Workers,
        invalid: InvalidMessages,
    ) -> None:
        """stack: closes its sockets. Raises AddressError or CurveError."""
        self._workers = workers
        self._coordinator = Coordinator(context, options, curve_dir, invalid) if replica == 0 else None
        if self._coordinator is not None:
            stack.callback(self._coordinator.close)
        self._member = Member(context, options, replica, curve_dir, workers, invalid)
        stack.callback(self._member.close)
        self._waves = Waves(options.max_steps_in_flight)
        self._num_waves_before = 0
        # Tokens of the steps in flight, in this replica alone.
        self._num_tokens: deque[int] = deque()

    @property
    def sockets(self) -> list[zmq.Socket]:
        """To be polled for input."""
        ends = [self._member] if self._coordinator is None else [self._member, self._coordinator]
        return [socket for end in ends for socket in (end.socket, end.monitor)]

    @property
    def num_waves(self) -> int:
        """Begun so far."""
        return self._num_waves_before + self._waves.num_begun

    @property
    def waiting_for(self) -> str:
        """Which replica keeps the others waiting, for people; empty: none does."""
        return self._member.waiting_for

    def next_check(self, now: float) -> float:
        """When `exchange` should be called next, if nothing arrives."""
        due = self._member.next_check(now)
        return due if self._coordinator is None else min(due, self._coordinator.next_check(now))

    def exchange(self, ready: Collection[object], now: float) -> list[Event]:
        """Lets this replica's epochs begin and end with those of the others. ready: sockets that have input."""
        # In steady state there is nothing to look at between two steps.
        is_quiet = self._workers.is_ready and now < self.next_check(now)
        if is_quiet and not any(socket in ready for socket in self.sockets):
            return []
        if self._coordinator is not None:
            self._coordinator.serve(now)
        return self._member.exchange(now)

    # --- Steps

    def begin_epoch(self, max_steps_in_flight: int) -> None:
        """The ranks are ready. max_steps_in_flight: the same in all replicas."""
        self._num_waves_before = self.num_waves
        self._waves = Waves(max_steps_in_flight)
        self._num_tokens.clear()

    def is_in_wave(self, step: int) -> bool:
        """True if this step, the next one, has to be sent, empty if need be. Raises WaveError."""
        self._waves.announce(self._member.wave_step)
        return self._waves.holds(step)

    def want_wave(self, step: int, now: float) -> None:
        """There is something to run in this step, the next one, and it is in no wave."""
        self._member.want_wave(step, now)

    def note_sent(self, plan: Plan) -> None:
        self._num_tokens.append(plan.num_tokens)
        self._member.note_step(plan.step)

    def note_result(self, step: int, num_tokens_of_all: int) -> None:
        """The oldest step in flight has returned. Raises WaveError; ResultError if the ranks have counted wrongly."""
        num_tokens = self._num_tokens.popleft()
        if num_tokens_of_all < num_tokens:
            raise ResultError(f"num_tokens_of_all is {num_tokens_of_all}, but {num_tokens} tokens were planned here")
        self._waves.note_result(step, num_tokens_of_all)
