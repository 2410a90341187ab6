"""A rank's state, for people who watch a replica."""

from dataclasses import dataclass

from protos import step_pb2
from scheduler.ranks.heartbeats import Beat
from scheduler.ranks.membership import Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeen:
    """Mirrors admin.proto's RankView."""

    rank: int
    pid: int
    state: str
    step: int
    silence: float


def see(rank: Rank, beat: Beat | None, now: float) -> RankSeen:
    """beat: its latest heartbeat."""
    if not rank.is_present:
        state = "lost"
    elif beat is None:
        state = "starting"
    else:
        state = step_pb2.WorkerState.Name(beat.state).removeprefix("WORKER_STATE_").lower()
    return RankSeen(
        rank=rank.rank,
        pid=rank.pid,
        state=state,
        step=0 if beat is None else beat.step,
        silence=-1.0 if beat is None else max(now - beat.heard, 0.0),
    )
