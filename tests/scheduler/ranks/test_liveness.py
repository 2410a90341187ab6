"""When a silent rank is lost, and that a scheduler which stood still itself first reads, then judges."""

from collections.abc import Callable

import pytest

from protos import step_pb2
from runtime.awake_time import AwakeTime
from scheduler.ranks.epochs import Epochs
from scheduler.ranks.heartbeats import Beat, Heartbeats
from scheduler.ranks.liveness import Liveness
from scheduler.ranks.membership import Rank


class Beats(Heartbeats):
    """The heartbeats that have been read so far."""

    def __init__(self) -> None:
        # No thread and no socket.
        self.heard = 0.0

    def latest(self, rank: int, instance: int) -> Beat:
        state = step_pb2.WORKER_STATE_IDLE
        return Beat(rank=rank, instance=instance, heard=self.heard, state=state, epoch=1, step=0, progress=1.0)


class Watched:
    """One rank, and a step loop that wakes each second until it stands still."""

    def __init__(self) -> None:
        self.beats, self.awake = Beats(), AwakeTime(1.0)
        self._liveness = Liveness(
            lambda _: True,
            self.beats,
            Epochs(None),
            self.awake,
            heartbeat_timeout=10.0,
            step_timeout=60.0,
        )
        self._rank = Rank.of(step_pb2.Hello(rank=0, instance=5), b"join-1", 0.0)
        self._rank.enter(0.0)

    def why_lost(self, now: float) -> str:
        self.awake.wake(now)
        return self._liveness.why_lost(self._rank, now, is_probing=False)


def _live(watched: Watched, seconds: range, beats: Callable[[int], bool]) -> dict[int, str]:
    """The verdict on the rank in each second in which the loop is awake, if anything."""
    said = {}
    for now in seconds:
        if beats(now):
            watched.beats.heard = float(now)
        if cause := watched.why_lost(float(now)):
            said[now] = cause
    return said


def test_a_silent_rank_is_lost_after_the_timeout() -> None:
    said = _live(Watched(), range(1, 20), lambda now: now <= 5)
    assert min(said) == 16
    assert said[16] == "has been silent for 11.0 s (heartbeat_timeout=10)"


@pytest.mark.parametrize("stall", [12, 15, 600])
def test_after_a_stall_of_the_scheduler_heartbeats_are_read_before_ranks_are_judged(stall: int) -> None:
    watched = Watched()
    assert not _live(watched, range(1, 6), lambda now: True)
    # The step loop wakes; the thread of the heartbeats has read none yet.
    assert not watched.why_lost(5.0 + stall)
    # A rank that is silent indeed is lost as soon after the stall as before one.
    said = _live(watched, range(6 + stall, 30 + stall), lambda now: False)
    assert min(said) == 5 + stall + 10
