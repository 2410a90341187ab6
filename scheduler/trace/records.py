"""What a trace consists of: typed records, encoded as MessagePack arrays.

Each file is a line of text, an Origin, a Snapshot of the core as it was, and then the calls made to the core in their
order, with the plans that came of them. `now` is as the core was told it.
"""

from typing import Annotated

import msgspec

from scheduler.messages import GroupRequest
from scheduler.trace.snapshot import Snapshot

# Grows with every change that an older or newer reader would misunderstand.
FORMAT_VERSION = 1

# Far more than fit into any machine, and still no danger to one that replays.
_BlockCount = Annotated[int, msgspec.Meta(ge=0, le=1 << 26)]


class Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The records of one union are told apart by their tags."""


class Origin(Record, tag="origin"):
    """Where a file comes from."""

    octavo_version: str
    replica: int
    # Random, the same in all files of one scheduler process; and which of them this is, from 1.
    run: str
    number: int
    # When the file began, in seconds since 1970.
    unix_time: float


class Submit(Record, tag="submit"):
    now: float
    # Without `sampling`.
    request: GroupRequest


class Cancel(Record, tag="cancel"):
    now: float
    group: int
    # None: all.
    choices: list[int] | None
    cause: str


class RowRecord(Record):
    """A PlannedRow without `sampling`. Its token ids, which follow from earlier records, are there as a digest."""

    row: int
    sequence: int
    num_tokens: int
    token_digest: bytes
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    choice: int


class PlanRecord(Record):
    """The fields mean what they mean in Plan."""

    step: int
    freed_rows: list[int]
    swapped_out: list[tuple[int, int]]
    swapped_in: list[tuple[int, int]]
    new_rows: list[RowRecord]
    trimmed_rows: list[tuple[int, int]]
    grown_rows: list[int]
    num_new_blocks: list[int]
    new_blocks: list[int]
    # uint16; None: those of the plan before.
    decode_rows: bytes | None
    chunks: list[tuple[int, int]]
    drafts: list[tuple[int, tuple[int, ...]]]


class Schedule(Record, tag="schedule"):
    """Calls that could give no plan because enough were in flight are left out: they change nothing."""

    now: float
    # None: nothing could run, or the core failed.
    plan: PlanRecord | None


class ScheduleEmpty(Record, tag="schedule_empty"):
    """A step in which nothing is computed was asked for, and there was room for it."""

    # None: the core failed.
    plan: PlanRecord | None


class ResultRecord(Record):
    """A Result without logprobs. The columns are bytes of the types that they have there."""

    step: int
    # None: those of the result before.
    sequences: bytes | None
    # None: behind the tokens that the result before brought for the same sequences.
    positions: bytes | None
    num_tokens: bytes | None
    token_ids: bytes
    drafts: dict[int, tuple[int, ...]]
    failed: frozenset[int]


class Apply(Record, tag="apply"):
    now: float
    result: ResultRecord


class LoseWorkers(Record, tag="lose_workers"):
    now: float


class BlameStep(Record, tag="blame_step"):
    now: float


class Resize(Record, tag="resize"):
    now: float
    num_blocks: _BlockCount
    num_swap_blocks: _BlockCount


class ResetPrefixCache(Record, tag="reset_prefix_cache"):
    pass


# Deadlines that passed are there as cancels.
Call = Submit | Cancel | Schedule | ScheduleEmpty | Apply | LoseWorkers | BlameStep | Resize | ResetPrefixCache
AnyRecord = Origin | Snapshot | Call
