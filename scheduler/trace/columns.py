"""Plans and results as records, and back. In steady decode their columns follow from those before, and are left out."""

from hashlib import blake2b

import msgspec
import numpy as np

from runtime.block_names import token_bytes
from scheduler.messages import Plan, PlannedRow, Result
from scheduler.trace.errors import TraceError
from scheduler.trace.records import PlanRecord, ResultRecord, RowRecord

_ROWS, _SEQUENCES, _TOKENS = np.dtype("<u2"), np.dtype("<i8"), np.dtype("<i4")
_DIGEST_SIZE = 16


def plan_record(plan: Plan) -> PlanRecord:
    """All of a plan but `sampling`: equal plans give equal records."""
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
        chunks=plan.chunks,
        drafts=plan.drafts,
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
    """Of a whole record."""
    return np.frombuffer(record.decode_rows or b"", _ROWS).tolist()


class Columns:
    """The columns of the latest plan and of the latest result in one file, as far as it is written, or read."""

    def __init__(self) -> None:
        self._decode_rows: bytes | None = None
        self._sequences: bytes | None = None
        # Where the next tokens of those sequences go.
        self._positions = b""

    # --- Writing

    def shorten(self, record: PlanRecord) -> PlanRecord:
        before, self._decode_rows = self._decode_rows, record.decode_rows
        return msgspec.structs.replace(record, decode_rows=None) if record.decode_rows == before else record

    def pack(self, result: Result) -> ResultRecord:
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
        """Undoes `shorten`. Raises TraceError."""
        if record.decode_rows is None:
            if self._decode_rows is None:
                raise TraceError("the first plan lacks its decode_rows")
            return msgspec.structs.replace(record, decode_rows=self._decode_rows)
        self._decode_rows = record.decode_rows
        return record

    def unpack(self, record: ResultRecord) -> Result:
        """Undoes `pack`. Raises TraceError."""
        sequences = self._sequences if record.sequences is None else record.sequences
        positions = self._positions if record.positions is None else record.positions
        if sequences is None:
            raise TraceError("the first result lacks its sequences")
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
            raise TraceError(f"the columns of the result of step {record.step} don't fit: {error}") from None
        return result

    def _remember(self, sequences: bytes, positions: np.ndarray, num_tokens: np.ndarray | None) -> None:
        self._sequences = sequences
        self._positions = _to_bytes(positions + (1 if num_tokens is None else num_tokens), _TOKENS)


def _to_bytes(column: np.ndarray, dtype: np.dtype) -> bytes:
    return column.astype(dtype, copy=False).tobytes()
