"""Judges which ranks are alive, by their connections, heartbeats and messages."""

import logging
from collections.abc import Callable, Iterable

from protos import step_pb2
from runtime.awake_time import AwakeTime
from scheduler.ranks.epochs import Epochs
from scheduler.ranks.heartbeats import Beat, Heartbeats
from scheduler.ranks.membership import Rank

log = logging.getLogger("octavo.scheduler")

# A rank that moves from one identity to the next is unreachable for a moment.
_REENTRY_GRACE_S = 5.0
# A rank heard from this recently is alive: another process that says Hello for it is refused.
_ALIVE_S = 3.0
# ZeroMQ reports a disconnect a little before it forgets the peer, so the peers are probed more than once.
_PROBE_DELAYS_S = (0.0, 0.02, 0.2, 1.0)
# Heartbeats come each second.
_MISSED_BEATS_S = 2.0


class Liveness:
    """Judges ranks; the caller acts. Times are monotonic seconds.

    Time in which this process stood still is no silence of a rank: its heartbeats may wait to be read.
    """

    def __init__(
        self,
        is_reachable: Callable[[bytes], bool],
        heartbeats: Heartbeats,
        epochs: Epochs,
        awake: AwakeTime,
        *,
        heartbeat_timeout: float,
        step_timeout: float,
    ) -> None:
        """is_reachable: returns True if a peer with this identity is connected."""
        self._is_reachable, self._heartbeats, self._epochs = is_reachable, heartbeats, epochs
        self._awake = awake
        self._heartbeat_timeout, self._step_timeout = heartbeat_timeout, step_timeout
        # Times to check connections at, in order; read only for callers.
        self.probe_times: list[float] = []

    def probe_soon(self, now: float) -> None:
        """Schedules checks of all connections, because a rank may have disconnected."""
        self.probe_times = [now + delay for delay in _PROBE_DELAYS_S]

    def take_due_probes(self, now: float) -> bool:
        """True if connections must be checked now."""
        is_due = bool(self.probe_times) and self.probe_times[0] <= now
        self.probe_times = [at for at in self.probe_times if at > now]
        return is_due

    def why_lost(self, rank: Rank, now: float, *, is_probing: bool) -> str:
        """The reason why a present rank is lost; empty if it is not. is_probing: checks its connection as well."""
        if (is_probing or not rank.has_entered) and (cause := self._why_disconnected(rank, now)):
            return cause
        silence = self._silence(rank, now)
        if silence > self._heartbeat_timeout:
            return f"has been silent for {silence:.1f} s (heartbeat_timeout={self._heartbeat_timeout:g})"
        if self._is_awaited(rank):
            self._complain_if_hung(rank, now)
        return ""

    def _why_disconnected(self, rank: Rank, now: float) -> str:
        if self._is_reachable(rank.identity):
            if not rank.has_entered:
                rank.enter(now)
        elif rank.has_entered:
            return "has disconnected"
        elif rank.previous_identity is None or not self._is_reachable(rank.previous_identity):
            rank.unreachable_since = rank.unreachable_since or now
            if self._awake.seconds(rank.unreachable_since, now) > _REENTRY_GRACE_S:
                return "has disconnected and has not come back"
        return ""

    def _complain_if_hung(self, rank: Rank, now: float) -> None:
        """Logs an error if a rank is still in a step of an ended epoch. Loading, however long, is no reason."""
        beat, wait = self.beat(rank), self._awake.seconds(rank.reset_at, now)
        is_stepping = beat is not None and beat.state == step_pb2.WORKER_STATE_STEPPING
        if is_stepping and wait > (rank.num_complaints + 1) * self._step_timeout:
            rank.num_complaints += 1
            log.error("%s has not left its step for %.0f s: end that process if it hangs", rank.name, wait)

    def is_back(self, rank: Rank, now: float) -> bool:
        """True if a lost rank was heard from again and is reachable under its identity."""
        return self._silence(rank, now) <= _ALIVE_S and self._is_reachable(rank.identity)

    def is_rightful(self, rank: Rank, now: float) -> bool:
        """True if a rank's process keeps the rank: it is alive and not stuck since its Reset."""
        is_stuck = self._is_awaited(rank) and rank.num_complaints > 0
        is_there = self._is_reachable(rank.identity) or (
            rank.previous_identity is not None and self._is_reachable(rank.previous_identity)
        )
        return is_there and not is_stuck and self._silence(rank, now) <= _ALIVE_S

    def silences(self, ranks: Iterable[Rank], now: float) -> str:
        """Names silent ranks, which may be why a step does not return. The caller appends it to a message."""
        silences = [(rank.name, self._silence(rank, now)) for rank in ranks]
        return "".join(f"; {name} has been silent for {s:.1f} s" for name, s in silences if s > _MISSED_BEATS_S)

    def beat(self, rank: Rank) -> Beat | None:
        """The latest heartbeat of a rank."""
        return self._heartbeats.latest(rank.rank, rank.instance)

    def _is_awaited(self, rank: Rank) -> bool:
        """True if a rank has yet to get ready, or at least to follow its last Reset."""
        return rank.model is None and (self._epochs.is_open or not rank.has_entered)

    def _silence(self, rank: Rank, now: float) -> float:
        beat = self.beat(rank)
        return self._awake.seconds(max(rank.heard, beat.heard) if beat else rank.heard, now)
