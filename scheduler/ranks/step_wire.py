"""The scheduler's end of the step wire: encodes plans, decodes results, and times the steps in flight."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protos import inference_pb2, step_pb2
from runtime.awake_time import AwakeTime
from runtime.wire import PROMPT_LOGPROBS_FRAME_BYTES, plan_digest
from scheduler.core.messages import Plan, PlannedRow, Result, SequenceKey


@dataclass(slots=True)
class StepTotals:
    """Sums over the steps that have returned since the scheduler started, in all epochs."""

    num_steps: int = 0
    # As StepClock.elapsed measures them.
    seconds: float = 0.0
    num_tokens: int = 0
    # Tokens whose KV the steps read: Plan.num_context_tokens.
    num_context_tokens: int = 0


class StepClock:
    """Times the steps in flight. Steps return in the order of sending; a worker begins one after finishing the last."""

    def __init__(self) -> None:
        self.totals = StepTotals()
        # Plans, when they were sent, and the seconds that they should take.
        self._sent: deque[tuple[Plan, float, float]] = deque()
        self._last_return = 0.0

    @property
    def awaited(self) -> int | None:
        """The step whose result is next; None if none is in flight."""
        return self._sent[0][0].step if self._sent else None

    def elapsed(self, now: float, awake: AwakeTime | None = None) -> float:
        """Seconds since the workers could begin the awaited step. awake: leaves out the time when this process stood
        still, in which it could not read a result."""
        if not self._sent:
            return 0.0
        since = max(self._sent[0][1], self._last_return)
        return now - since if awake is None else awake.seconds(since, now)

    def left(self, now: float) -> float:
        """Seconds until the steps in flight should have returned; 0 or less if they are late, or none are in flight."""
        if not self._sent:
            return 0.0
        left = max(self._sent[0][1], self._last_return) - now
        for _, _, expected in self._sent:
            left += expected
        return left

    def send(self, plan: Plan, now: float, expected: float = 0.0) -> None:
        """expected: the seconds that the step should take; 0 if that is not known."""
        self._sent.append((plan, now, expected))

    def finish(self, now: float) -> tuple[Plan, float]:
        """Records that the awaited step has returned. Returns its plan and the seconds that it took."""
        totals, seconds = self.totals, self.elapsed(now)
        plan = self._sent.popleft()[0]
        totals.num_steps += 1
        totals.seconds += seconds
        totals.num_tokens += plan.num_tokens
        totals.num_context_tokens += plan.num_context_tokens
        self._last_return = now
        return plan, seconds

    def clear(self) -> None:
        """Forgets the steps in flight."""
        self._sent.clear()


_INT64, _INT32 = np.dtype("<i8"), np.dtype("<i4")
# An upper bound of all bytes in a frame besides its logprobs.
_FRAME_OVERHEAD_BYTES = 1024


class ResultError(ValueError):
    """A result that breaks an invariant of step.proto: its sender can no longer be trusted. Names the field."""


class GroupSampling:
    """The sampling parameters of a group, opaque to the core.

    Only its first choice computes prompt logprobs, and only until its prompt is done: a sequence that returns with
    output tokens has delivered them.
    """

    __slots__ = ("_params", "_params_without_prompt", "first_choice", "group")

    def __init__(self, params: inference_pb2.SamplingParams, *, group: int, first_choice: int) -> None:
        self.group, self.first_choice = group, first_choice
        self._params = self._params_without_prompt = params
        if params.HasField("prompt_logprobs"):
            self._params_without_prompt = inference_pb2.SamplingParams()
            self._params_without_prompt.CopyFrom(params)
            self._params_without_prompt.ClearField("prompt_logprobs")

    @property
    def has_logprobs(self) -> bool:
        return self._params.HasField("logprobs")

    def params_for(self, row: PlannedRow) -> inference_pb2.SamplingParams:
        has_output = len(row.token_ids) > row.num_prompt_tokens
        return self._params_without_prompt if has_output or row.choice != self.first_choice else self._params


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """A result for the core, and frames of prompt logprobs by sequence, which bypass the core.

    A frame counts even if its sequence has been preempted since: after a swap it would not come again.
    """

    result: Result
    prompt_logprobs: list[tuple[SequenceKey, inference_pb2.PromptLogprobs]]


class StepCodec:
    """Encodes the plans and decodes the results of one epoch. Step numbers and digests chain the plans.

    Results are decoded in the order of their plans; several plans may be encoded before the first result comes.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._digest = b""
        # Number of the last plan encoded; 0 before the first one.
        self.step = 0
        # Rows that return logprobs of either kind, with their sequences.
        self._logprob_rows: dict[int, int] = {}
        # Sequences that return logprobs of output tokens, and of prompt tokens, in results still to come.
        # `_leaving` says when they leave: (step that freed the row, sequence).
        self._logprob_sequences: set[int] = set()
        self._scoring_sequences: dict[int, SequenceKey] = {}
        self._leaving: deque[tuple[int, int]] = deque()

    def encode(self, plan: Plan) -> bytes:
        """Returns the frame (a SchedulerToWorker) for all ranks."""
        assert plan.step == self.step + 1, f"plan {plan.step} follows {self.step}"
        self.step = plan.step
        message = step_pb2.SchedulerToWorker()
        wire = message.plan
        wire.epoch, wire.step, wire.previous_digest = self._epoch, plan.step, self._digest
        # In steady decode, this is the whole plan.
        wire.decode_rows = plan.decode_rows.astype("<u2", copy=False).tobytes()
        if plan.grown_rows:
            wire.grown_rows.extend(plan.grown_rows)
            wire.num_new_blocks.extend(plan.num_new_blocks)
            wire.new_blocks.extend(plan.new_blocks)
        if plan.chunks:
            wire.rows.extend([row for row, _ in plan.chunks])
            wire.num_tokens.extend([count for _, count in plan.chunks])
        if plan.freed_rows:
            wire.freed_rows.extend(plan.freed_rows)
            self._forget_rows(plan.freed_rows)
        for row in plan.new_rows:
            self._encode_row(row, wire.new_rows.add())
        if plan.trimmed_rows:
            wire.trimmed_rows.extend([row for row, _ in plan.trimmed_rows])
            wire.num_kept_blocks.extend([count for _, count in plan.trimmed_rows])
        if plan.swapped_out or plan.swapped_in:
            wire.swap_out_blocks.extend([block for block, _ in plan.swapped_out])
            wire.swap_out_host_blocks.extend([host for _, host in plan.swapped_out])
            wire.swap_in_host_blocks.extend([host for host, _ in plan.swapped_in])
            wire.swap_in_blocks.extend([block for _, block in plan.swapped_in])
        if plan.has_drafts:
            wire.rows_with_drafts = plan.rows_with_drafts.astype("<u2", copy=False).tobytes()
            wire.num_drafts = plan.num_drafts.astype(_INT32, copy=False).tobytes()
            wire.draft_token_ids = plan.draft_token_ids.astype(_INT32, copy=False).tobytes()
        if plan.wanted_drafts:
            wire.drafting_rows.extend([row for row, _ in plan.wanted_drafts])
            wire.num_wanted_drafts.extend([count for _, count in plan.wanted_drafts])
        if plan.dropped_items:
            wire.dropped_items.extend(plan.dropped_items)
        if plan.forgotten_items:
            wire.forgotten_items.extend(plan.forgotten_items)
        if plan.encoded_items:
            wire.encoded_items.extend(plan.encoded_items)
        frame = message.SerializeToString()
        self._digest = plan_digest(frame)
        return frame

    def _encode_row(self, row: PlannedRow, wire: step_pb2.NewRow) -> None:
        sampling = row.sampling
        assert isinstance(sampling, GroupSampling)
        params = sampling.params_for(row)
        if sampling.has_logprobs:
            self._logprob_rows[row.row] = row.sequence
            self._logprob_sequences.add(row.sequence)
        if params.HasField("prompt_logprobs"):
            self._logprob_rows[row.row] = row.sequence
            self._scoring_sequences[row.sequence] = (sampling.group, row.choice)
        wire.row, wire.sequence, wire.choice = row.row, row.sequence, row.choice
        wire.num_prompt_tokens, wire.num_computed_tokens = row.num_prompt_tokens, row.num_computed_tokens
        wire.token_ids.extend(row.token_ids)
        wire.block_ids.extend(row.block_ids)
        wire.sampling.CopyFrom(params)
        for number, span in row.items:
            wire.items.add(
                number=number,
                first_token=span.first_token,
                num_tokens=span.num_tokens,
                grid=span.grid,
                time_step=span.time_step,
            )

    def _forget_rows(self, rows: Sequence[int]) -> None:
        if self._logprob_rows:
            for row in rows:
                if (sequence := self._logprob_rows.pop(row, None)) is not None:
                    self._leaving.append((self.step, sequence))

    def decode(self, result: step_pb2.StepResult) -> StepOutcome:
        """Decodes a result. Raises ResultError."""
        while self._leaving and self._leaving[0][0] <= result.step:
            _, sequence = self._leaving.popleft()
            self._logprob_sequences.discard(sequence)
            self._scoring_sequences.pop(sequence, None)
        sequences = _column(result.sequences, "sequences", _INT64)
        positions = _column(result.positions, "positions", _INT32)
        token_ids = _column(result.token_ids, "token_ids", _INT32)
        num_tokens = _column(result.num_tokens, "num_tokens", _INT32) if result.num_tokens else None
        if len(positions) != len(sequences):
            raise ResultError(f"positions has {len(positions)} entries for {len(sequences)} sequences")
        _check_counts(len(sequences), num_tokens, len(token_ids))
        if len(token_ids) and np.minimum.reduce(token_ids) < 0:
            raise ResultError(f"token_ids holds {token_ids.min()}")
        # Checked first: even an empty loop takes time, and most results have no frames.
        frames = list(result.prompt_logprobs) if result.prompt_logprobs else []
        for row in frames:
            if row.sequence not in self._scoring_sequences:
                raise ResultError(f"prompt_logprobs has a frame of sequence {row.sequence}, which did not ask for any")
            if row.frame.ByteSize() > PROMPT_LOGPROBS_FRAME_BYTES + _FRAME_OVERHEAD_BYTES:
                raise ResultError(f"prompt_logprobs has a frame of {row.frame.ByteSize()} bytes")
        decoded = Result(
            step=result.step,
            sequences=sequences,
            positions=positions,
            num_tokens=num_tokens,
            token_ids=token_ids,
        )
        if result.drafts:
            decoded.drafts = {each.sequence: tuple(each.token_ids) for each in result.drafts}
        if result.failed_sequences:
            decoded.failed = frozenset(result.failed_sequences)
            if len(result.failure_messages) == len(result.failed_sequences):
                decoded.why_failed = dict(zip(result.failed_sequences, result.failure_messages, strict=True))
            elif result.failure_messages:
                raise ResultError(
                    f"failure_messages has {len(result.failure_messages)} entries for {len(result.failed_sequences)} "
                    f"failed_sequences"
                )
        if self._logprob_sequences or result.logprobs:
            decoded.logprobs = self._logprobs(decoded, result.logprobs)
        return StepOutcome(
            result=decoded,
            prompt_logprobs=[(self._scoring_sequences[row.sequence], row.frame) for row in frames],
        )

    def _logprobs(self, result: Result, logprobs: Sequence[inference_pb2.TokenLogprobs]) -> dict[int, list[object]]:
        """Logprobs by sequence, for those that asked for them."""
        found: dict[int, list[object]] = {}
        asked, start = self._logprob_sequences, 0
        counts = [1] * len(result.sequences) if result.num_tokens is None else result.num_tokens.tolist()
        for sequence, count in zip(result.sequences.tolist(), counts, strict=True):
            if sequence in asked:
                found[sequence] = list(logprobs[start : start + count])
                start += count
        if start != len(logprobs):
            raise ResultError(f"logprobs has {len(logprobs)} entries where {start} tokens asked for them")
        return found


def _column(data: bytes, field: str, dtype: np.dtype) -> np.ndarray:
    """Raises ResultError."""
    if len(data) % dtype.itemsize:
        raise ResultError(f"{field} has {len(data)} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def _check_counts(num_sequences: int, num_tokens: np.ndarray | None, num_token_ids: int) -> None:
    """Raises ResultError."""
    if num_tokens is None:
        if num_token_ids != num_sequences:
            raise ResultError(f"token_ids has {num_token_ids} entries for {num_sequences} sequences")
        return
    if len(num_tokens) != num_sequences:
        raise ResultError(f"num_tokens has {len(num_tokens)} entries for {num_sequences} sequences")
    if num_sequences and num_tokens.min() < 1:
        raise ResultError(f"num_tokens holds {num_tokens.min()}; a sequence that sampled has at least 1")
    if num_tokens.sum() != num_token_ids:
        raise ResultError(f"token_ids has {num_token_ids} entries; the sum of num_tokens is {num_tokens.sum()}")
