"""The records of a recording, encoded as MessagePack arrays; converts plans and results to records.

In steady decode a record leaves out the columns that follow from the previous plan or result.
"""

from hashlib import blake2b
from typing import Annotated

import msgspec
import numpy as np

from runtime.block_hashes import token_bytes
from scheduler.core.messages import GroupRequest, Plan, PlannedRow, Result, StepCosts
from scheduler.core.saved import Snapshot


class RecordingError(ValueError):
    """The file can't be written, is not a recording, is damaged, or has another version. The message names it and says
    what would help."""


# To be raised with every change that an older or newer reader would misunderstand.
FORMAT_VERSION = 10
# Read as well: no request of format 2 has a rule about repetitions, none of format 3 a constraint, no core of format 4
# has drafters, no request of format 5 has items, no core of format 6 has an inter_token_latency_target, none of format
# 7 was told what choosing drafts takes, and none of format 8 what catching up costs a drafter.
READABLE_VERSIONS = (2, 3, 4, 5, 6, 7, 8, 9, FORMAT_VERSION)
# Drafters of earlier formats proposed and chose by other rules.
FIRST_VERSION_WITH_TODAYS_DRAFTS = 10

# Far more than fit into any machine, but few enough to replay safely.
_BlockCount = Annotated[int, msgspec.Meta(ge=0, le=1 << 26)]


class Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A record. Tags distinguish the records of one union."""


class Origin(Record, tag="origin"):
    """The origin of a file."""

    octavo_version: str
    replica: int
    # run: random, the same in all files of one scheduler process; number: counts its files from 1.
    run: str
    number: int
    # Start of the file, in seconds since 1970.
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
    """A PlannedRow without `sampling`. It has only a digest of its token ids and none of its items: these follow from
    earlier records."""

    row: int
    sequence: int
    num_tokens: int
    token_digest: bytes
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    choice: int


class PlanRecord(Record):
    """A plan; the fields are those of Plan."""

    step: int
    freed_rows: list[int]
    swapped_out: list[tuple[int, int]]
    swapped_in: list[tuple[int, int]]
    new_rows: list[RowRecord]
    trimmed_rows: list[tuple[int, int]]
    grown_rows: list[int]
    num_new_blocks: list[int]
    new_blocks: list[int]
    # uint16; None: the same as in the previous plan.
    decode_rows: bytes | None
    # Rows with drafts, too, before the others.
    chunks: list[tuple[int, int]]
    drafts: list[tuple[int, tuple[int, ...]]]
    wanted_drafts: list[tuple[int, int]] = []
    dropped_items: list[int] = []
    forgotten_items: list[int] = []
    encoded_items: list[int] = []


class Schedule(Record, tag="schedule"):
    """A call of `schedule`. Calls with max_steps_in_flight plans in flight are left out: they change nothing."""

    now: float
    # None if nothing could run, or the core failed.
    plan: PlanRecord | None


class ScheduleEmpty(Record, tag="schedule_empty"):
    """A call of `schedule_empty`, with fewer than max_steps_in_flight plans in flight."""

    # None if the core failed.
    plan: PlanRecord | None


class ResultRecord(Record):
    """A Result without logprobs. The columns are bytes of the same types as in Result."""

    step: int
    # None: the same as in the previous result.
    sequences: bytes | None
    # None: they follow the tokens of the previous result, which has the same sequences.
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
    # None: as before.
    encoder_cache_size: int | None = None


class SetCosts(Record, tag="set_costs"):
    costs: StepCosts


class ItemPrepared(Record, tag="item_prepared"):
    number: int


class ItemFailed(Record, tag="item_failed"):
    now: float
    number: int
    message: str


class ResetPrefixCache(Record, tag="reset_prefix_cache"):
    pass


# Deadlines that passed are recorded as cancels.
Call = (
    Submit
    | Cancel
    | Schedule
    | ScheduleEmpty
    | Apply
    | LoseWorkers
    | BlameStep
    | Resize
    | SetCosts
    | ItemPrepared
    | ItemFailed
    | ResetPrefixCache
)
AnyRecord = Origin | Snapshot | Call


_ROWS, _SEQUENCES, _TOKENS = np.dtype("<u2"), np.dtype("<i8"), np.dtype("<i4")
_DIGEST_SIZE = 16


def plan_record(plan: Plan) -> PlanRecord:
    """Converts a plan without `sampling`. Equal plans give equal records."""
    drafts = plan.drafts
    return PlanRecord(
        step=plan.step,
        freed_rows=plan.freed_rows,
        swapped_out=plan.swapped_out,
        swapped_in=plan.swapped_in,
        new_rows=[_row_record(planned) for planned in plan.new_rows],
        trimmed_rows=plan.trimmed_rows,
        grown_rows=plan.grown_rows,
        num_new_blocks=plan.num_new_blocks,
        new_blocks=plan.new_blocks,
        decode_rows=_to_bytes(plan.decode_rows, _ROWS),
        chunks=[*((row, 1 + len(token_ids)) for row, token_ids in drafts), *plan.chunks],
        drafts=drafts,
        wanted_drafts=plan.wanted_drafts,
        dropped_items=plan.dropped_items,
        forgotten_items=plan.forgotten_items,
        encoded_items=plan.encoded_items,
    )


def _row_record(planned: PlannedRow) -> RowRecord:
    return RowRecord(
        row=planned.row,
        sequence=planned.sequence,
        num_tokens=len(planned.token_ids),
        token_digest=blake2b(token_bytes(planned.token_ids), digest_size=_DIGEST_SIZE).digest(),
        num_prompt_tokens=planned.num_prompt_tokens,
        num_computed_tokens=planned.num_computed_tokens,
        block_ids=planned.block_ids,
        choice=planned.choice,
    )


def decode_rows_of(record: PlanRecord) -> list[int]:
    """The decode rows of a record that `shorten` has not shortened."""
    return np.frombuffer(record.decode_rows or b"", _ROWS).tolist()


class RecordedColumns:
    """The columns of the latest plan and the latest result in one file, while it is written or read."""

    def __init__(self) -> None:
        self._decode_rows: bytes | None = None
        self._sequences: bytes | None = None
        # Output positions of the next tokens of those sequences.
        self._positions = b""

    # --- Writing

    def shorten(self, record: PlanRecord) -> PlanRecord:
        """Drops decode_rows if they are the same as in the previous plan."""
        before, self._decode_rows = self._decode_rows, record.decode_rows
        return msgspec.structs.replace(record, decode_rows=None) if record.decode_rows == before else record

    def pack(self, result: Result) -> ResultRecord:
        """Converts a result; drops columns that follow from the previous one."""
        sequences, positions = _to_bytes(result.sequences, _SEQUENCES), _to_bytes(result.positions, _TOKENS)
        are_same = sequences == self._sequences
        record = ResultRecord(
            step=result.step,
            sequences=None if are_same else sequences,
            positions=None if are_same and positions == self._positions else positions,
            num_tokens=None if result.num_tokens is None else _to_bytes(result.num_tokens, _TOKENS),
            token_ids=_to_bytes(result.token_ids, _TOKENS),
            drafts=result.drafts,
            failed=result.failed,
        )
        self._remember(sequences, result.positions, result.num_tokens)
        return record

    # --- Reading

    def lengthen(self, record: PlanRecord) -> PlanRecord:
        """Undoes `shorten`. Raises RecordingError."""
        if record.decode_rows is None:
            if self._decode_rows is None:
                raise RecordingError("the first plan lacks its decode_rows")
            return msgspec.structs.replace(record, decode_rows=self._decode_rows)
        self._decode_rows = record.decode_rows
        return record

    def unpack(self, record: ResultRecord) -> Result:
        """Undoes `pack`. Raises RecordingError."""
        sequences = self._sequences if record.sequences is None else record.sequences
        positions = self._positions if record.positions is None else record.positions
        if sequences is None:
            raise RecordingError("the first result lacks its sequences")
        try:
            result = Result(
                step=record.step,
                sequences=np.frombuffer(sequences, _SEQUENCES),
                positions=np.frombuffer(positions, _TOKENS),
                num_tokens=None if record.num_tokens is None else np.frombuffer(record.num_tokens, _TOKENS),
                token_ids=np.frombuffer(record.token_ids, _TOKENS),
                drafts=record.drafts,
                failed=record.failed,
            )
            self._remember(sequences, result.positions, result.num_tokens)
        except ValueError as error:
            raise RecordingError(f"the columns of the result of step {record.step} don't fit: {error}") from None
        return result

    def _remember(self, sequences: bytes, positions: np.ndarray, num_tokens: np.ndarray | None) -> None:
        self._sequences = sequences
        self._positions = _to_bytes(positions + (1 if num_tokens is None else num_tokens), _TOKENS)


def _to_bytes(column: np.ndarray, dtype: np.dtype) -> bytes:
    return column.astype(dtype, copy=False).tobytes()
