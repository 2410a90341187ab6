"""The core's plans as bytes for the ranks, and the ranks' results as values for the core."""

from dataclasses import dataclass

from protos import inference_pb2, step_pb2
from runtime.wire import PROMPT_LOGPROBS_FRAME_BYTES, plan_digest
from scheduler.messages import Plan, PlannedRow, Result, Sampled

# What surrounds the logprobs of a frame.
_FRAME_OVERHEAD_BYTES = 1024


class ResultError(ValueError):
    """A result that breaks an invariant of step.proto: the rank that sent it can't be trusted any more."""


class GroupSampling:
    """The sampling parameters of a group, opaque to the core.

    Only its first choice computes prompt logprobs, and not again once its prompt is done: a sequence that comes back
    with output tokens has delivered them.
    """

    __slots__ = ("_params", "_params_without_prompt", "prompt_logprobs_choice")

    def __init__(self, params: inference_pb2.SamplingParams, first_choice: int) -> None:
        self._params = self._params_without_prompt = params
        # None: no choice computes them.
        self.prompt_logprobs_choice: int | None = None
        if params.HasField("prompt_logprobs"):
            self.prompt_logprobs_choice = first_choice
            self._params_without_prompt = inference_pb2.SamplingParams()
            self._params_without_prompt.CopyFrom(params)
            self._params_without_prompt.ClearField("prompt_logprobs")

    @property
    def has_logprobs(self) -> bool:
        return self._params.HasField("logprobs")

    def params_for(self, row: PlannedRow) -> inference_pb2.SamplingParams:
        has_output = len(row.token_ids) > row.num_prompt_tokens
        if has_output or row.choice != self.prompt_logprobs_choice:
            return self._params_without_prompt
        return self._params


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """A result as the core takes it, and the frames of prompt logprobs, which pass it by, with their sequences."""

    result: Result
    prompt_logprobs: list[tuple[int, inference_pb2.PromptLogprobs]]


class StepCodec:
    """The plans and results of one epoch. Step numbers and digests chain the plans."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._digest = b""
        # Number of the last plan encoded; 0 before the first one.
        self.step = 0
        # Rows whose tokens come with logprobs: their sequences.
        self._logprob_rows: dict[int, int] = {}

    def encode(self, plan: Plan) -> bytes:
        """The frame (a SchedulerToWorker) for all ranks."""
        self.step += 1
        for row in plan.freed_rows:
            self._logprob_rows.pop(row, None)
        message = step_pb2.SchedulerToWorker(
            plan=step_pb2.StepPlan(
                epoch=self._epoch,
                step=self.step,
                previous_digest=self._digest,
                freed_rows=plan.freed_rows,
                new_rows=[self._encode_row(row) for row in plan.new_rows],
                grown_rows=[row for row, _ in plan.grown_rows],
                num_new_blocks=[len(blocks) for _, blocks in plan.grown_rows],
                new_blocks=[block for _, blocks in plan.grown_rows for block in blocks],
                rows=[row for row, _ in plan.scheduled],
                num_tokens=[count for _, count in plan.scheduled],
            )
        )
        frame = message.SerializeToString()
        self._digest = plan_digest(frame)
        return frame

    def _encode_row(self, row: PlannedRow) -> step_pb2.NewRow:
        assert isinstance(row.sampling, GroupSampling)
        if row.sampling.has_logprobs:
            self._logprob_rows[row.row] = row.sequence
        return step_pb2.NewRow(
            row=row.row,
            sequence=row.sequence,
            token_ids=row.token_ids,
            num_prompt_tokens=row.num_prompt_tokens,
            num_computed_tokens=row.num_computed_tokens,
            block_ids=row.block_ids,
            sampling=row.sampling.params_for(row),
            choice=row.choice,
        )

    def decode(self, result: step_pb2.StepResult) -> StepOutcome:
        """Raises ResultError."""
        sequences = result.sequences
        if not len(sequences) == len(result.positions) == len(result.token_ids):
            raise ResultError(
                f"its columns have {len(sequences)} sequences, {len(result.positions)} positions and "
                f"{len(result.token_ids)} token_ids"
            )
        for row in result.prompt_logprobs:
            if row.frame.ByteSize() > PROMPT_LOGPROBS_FRAME_BYTES + _FRAME_OVERHEAD_BYTES:
                raise ResultError(f"it has a frame of prompt logprobs of {row.frame.ByteSize()} bytes")
        columns = zip(sequences, result.positions, result.token_ids, strict=True)
        if self._logprob_rows or result.logprobs:
            sampled = self._decode_with_logprobs(list(columns), result)
        else:
            sampled = [Sampled(sequence=s, position=p, token_id=t) for s, p, t in columns]
        return StepOutcome(
            result=Result(sampled=sampled, failed=frozenset(result.failed_sequences)),
            prompt_logprobs=[(row.sequence, row.frame) for row in result.prompt_logprobs],
        )

    def _decode_with_logprobs(self, columns: list[tuple[int, int, int]], result: step_pb2.StepResult) -> list[Sampled]:
        asked = set(self._logprob_rows.values())
        num_expected = sum(sequence in asked for sequence, _, _ in columns)
        if num_expected != len(result.logprobs):
            raise ResultError(f"it has {len(result.logprobs)} logprobs where {num_expected} tokens asked for them")
        logprobs = iter(result.logprobs)
        return [
            Sampled(sequence=s, position=p, token_id=t, logprobs=next(logprobs) if s in asked else None)
            for s, p, t in columns
        ]
