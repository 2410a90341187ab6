"""The begin and end of waves: runs of steps that replicas compute together, as the step loop sees them."""

from collections import deque
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

import zmq

from configs.options import Options
from runtime.awake_time import AwakeTime
from scheduler.core.messages import Plan
from scheduler.lockstep.coordinator import Coordinator
from scheduler.lockstep.member import Member
from scheduler.ranks.epochs import Event
from scheduler.ranks.step_wire import ResultError
from scheduler.ranks.workers import Workers
from scheduler.sockets import InvalidMessages


class WaveError(RuntimeError):
    """Replicas disagree about the steps of a wave: one of them has broken the rule."""


class Waves:
    """The waves of one replica, in one epoch. Steps are numbered from 1."""

    def __init__(self, max_steps_in_flight: int) -> None:
        """max_steps_in_flight: the same in all replicas."""
        self._max_steps_in_flight = max_steps_in_flight
        # The latest wave's first step, and the first step after it; None: its end is not known yet.
        self._first = 0
        self._end: int | None = 1
        # First step of the next wave, if it was announced before this one's end is known here; 0: it was not.
        self._next = 0
        self._num_empty = 0
        self.num_begun = 0

    def holds(self, step: int) -> bool:
        """True if the next step to send, `step`, belongs to a wave: then it must be sent, even if it is empty.

        Waves follow each other without a gap, and the last steps of one may still be due here when the next one begins.
        """
        return self._end is None or step < self._end

    def announce(self, first_step: int) -> None:
        """Takes the first step of the latest wave from the coordinator, which may repeat it; 0: there was none. Raises
        WaveError."""
        if first_step <= self._first:
            return
        self._next = first_step
        if self._end is not None:
            self._begin_next(self._end)

    def note_result(self, step: int, num_tokens: int) -> None:
        """Records that a step has returned; steps return in order. num_tokens: the sum over all replicas. Raises
        WaveError."""
        if self._end is not None or step < self._first:
            return
        self._num_empty = 0 if num_tokens else self._num_empty + 1
        if self._num_empty == self._max_steps_in_flight:
            self._end = step + self._max_steps_in_flight
            if self._next:
                self._begin_next(self._end)

    def _begin_next(self, end: int) -> None:
        if self._next != end:
            raise WaveError(f"a wave should begin at step {self._next}, but the previous one ends before step {end}")
        self._first, self._end, self._next = end, None, 0
        self._num_empty = 0
        self.num_begun += 1


class Lockstep:
    """One scheduler's part in the lockstep; replica 0 also has the coordinator. Steps count from 1 in each epoch."""

    def __init__(
        self,
        stack: ExitStack,
        context: zmq.Context,
        options: Options,
        replica: int,
        curve_dir: Path | None,
        workers: Workers,
        invalid: InvalidMessages,
        awake: AwakeTime,
    ) -> None:
        """stack: closes the sockets. Raises AddressError or CurveError."""
        self._workers = workers
        self._coordinator = Coordinator(context, options, curve_dir, invalid, awake) if replica == 0 else None
        if self._coordinator is not None:
            stack.callback(self._coordinator.close)
        self._member = Member(context, options, replica, curve_dir, workers, invalid, awake)
        stack.callback(self._member.close)
        self._waves = Waves(options.max_steps_in_flight)
        self._num_waves_before = 0
        # Tokens of the steps in flight, in this replica alone.
        self._num_tokens: deque[int] = deque()

    @property
    def sockets(self) -> list[zmq.Socket]:
        """Sockets to poll for input."""
        ends = [self._member] if self._coordinator is None else [self._member, self._coordinator]
        return [socket for end in ends for socket in (end.socket, end.monitor)]

    @property
    def num_waves(self) -> int:
        """The number of waves begun so far."""
        return self._num_waves_before + self._waves.num_begun

    @property
    def waiting_for(self) -> str:
        """Names the replica that keeps the others waiting, for messages; empty: none does."""
        return self._member.waiting_for

    def next_check(self, now: float) -> float:
        """The time to call `exchange` next if nothing arrives."""
        due = self._member.next_check(now)
        return due if self._coordinator is None else min(due, self._coordinator.next_check(now))

    def exchange(self, ready: Collection[object], now: float) -> list[Event]:
        """Begins and ends this replica's epochs with those of the others. ready: sockets that have input."""
        # In steady state there is nothing to do between two steps.
        is_quiet = self._workers.is_ready and now < self.next_check(now)
        if is_quiet and not any(socket in ready for socket in self.sockets):
            return []
        if self._coordinator is not None:
            self._coordinator.serve(now)
        return self._member.exchange(now)

    # --- Steps

    def begin_epoch(self, max_steps_in_flight: int) -> None:
        """Begins an epoch: the ranks are ready. max_steps_in_flight: the same in all replicas."""
        self._num_waves_before = self.num_waves
        self._waves = Waves(max_steps_in_flight)
        self._num_tokens.clear()

    def is_in_wave(self, step: int) -> bool:
        """True if the next step, `step`, must be sent, even if it is empty. Raises WaveError."""
        self._waves.announce(self._member.wave_step)
        return self._waves.holds(step)

    def want_wave(self, step: int, now: float) -> None:
        """Asks for a wave: there is work for the next step, `step`, but it is in no wave."""
        self._member.want_wave(step, now)

    def note_sent(self, plan: Plan) -> None:
        self._num_tokens.append(plan.num_tokens)
        self._member.note_step(plan.step)

    def note_result(self, step: int, num_tokens_of_all: int) -> None:
        """Records that the oldest step in flight has returned. Raises WaveError; ResultError if the ranks have counted
        wrongly."""
        num_tokens = self._num_tokens.popleft()
        if num_tokens_of_all < num_tokens:
            raise ResultError(f"num_tokens_of_all is {num_tokens_of_all}, but {num_tokens} tokens were planned here")
        self._waves.note_result(step, num_tokens_of_all)
