"""A look at one replica, which the step loop takes when a person watches."""

from dataclasses import dataclass

from scheduler.core.look import CoreLook
from scheduler.core.messages import CoreLoad, CoreStats
from scheduler.ranks.seen import RankSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """A step that has returned. Mirrors admin.proto's StepView."""

    step: int
    num_decode_tokens: int
    num_draft_tokens: int
    num_prefill_tokens: int
    seconds: float
    age: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """look: None before the first epoch. workers: their state, in a few words."""

    load: CoreLoad
    stats: CoreStats
    look: CoreLook | None
    epoch: int
    workers_ready: bool
    draining: bool
    workers: str
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    ranks: tuple[RankSeen, ...]
    steps: tuple[StepSeen, ...]
