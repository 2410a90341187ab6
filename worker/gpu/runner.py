"""Computes plans on a GPU: a step begins while earlier ones are in flight."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from protos import inference_pb2, step_pb2
from worker.device.device import Device, InterpretedDevice
from worker.encoders.items import Items, check_no_items
from worker.errors import PlanError
from worker.gpu.pending import PendingStep, StepWaiter
from worker.gpu.ranks import GpuRanks
from worker.gpu.swap import GpuSwapSpace
from worker.models.drafting.drafter import Drafter
from worker.parallel.groups import Groups
from worker.step.batch import Gathered, gather
from worker.step.inputs import PromptScores, Scheduled, StepInputs, StepOutputs
from worker.step.masks import begin_masks, find_forced
from worker.step.results import BegunStep, ScoredPrompt, scored_prompts
from worker.step.rows import Rows, decoding_rows, planned_swaps
from worker.step.warm_up import warm_up_plans

Given = ParamSpec("Given")
Result = TypeVar("Result")


def _on_stream(
    method: "Callable[Concatenate[GpuRunner, Given], Result]",
) -> "Callable[Concatenate[GpuRunner, Given], Result]":
    """Has a method's work on the device's stream: torch keeps the current stream and device per thread, and callers may
    be any thread, such as AsyncLLM's."""

    @wraps(method)
    def on_stream(self: "GpuRunner", *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with self.device.current():
            return method(self, *args, **kwargs)

    return on_stream


class Engine(Protocol):
    """worker.gpu.engine.GpuEngine, or worker.gpu.build.GuardedEngine around it."""

    def begin(self, inputs: StepInputs) -> PendingStep: ...
    def reset(self) -> None: ...


class GpuRunner:
    """One rank's engine and the host's side of its rows. `worker.gpu.build.build_gpu_runner` makes one from options."""

    holds_constrained = True

    def __init__(
        self,
        engine: Engine,
        rows: Rows,
        model_info: inference_pb2.ModelInfo,
        *,
        swap_space: GpuSwapSpace,
        max_steps_in_flight: int,
        device: Device | None = None,
        ranks: GpuRanks | None = None,
        drafter: Drafter | None = None,
        items: Items | None = None,
    ) -> None:
        """max_steps_in_flight: steps that may have begun without their results having been taken. device: the
        engine's; None: one without streams. ranks: set if several ranks compute a step together. drafter: only where
        results are sent. items: None: the model takes text only."""
        self._engine, self._rows, self._swap_space = engine, rows, swap_space
        self._max_steps_in_flight, self._ranks = max_steps_in_flight, ranks
        self._drafter = drafter
        self.device: Device = device or InterpretedDevice()
        self.items = items
        # Sent to the scheduler in Ready.
        self.model_info = model_info
        self._waiter = StepWaiter()
        self._in_flight: deque[GpuResult] = deque()
        # Rows in flight with drafts, whose number of tokens is known only with the result, and those in flight with a
        # constraint, whose next mask depends on it.
        self._unsettled_rows: set[int] = set()
        # Sequences whose logits were not finite; kept until no result can name them any more.
        self._failed_sequences: set[int] = set()

    @property
    def num_swap_blocks(self) -> int:
        """Host blocks for swapped KV."""
        return self._swap_space.num_blocks

    @property
    def drafter(self) -> str:
        """See worker.step.runner.StepRunner."""
        return "" if self._drafter is None else self._drafter.name

    @property
    def num_live_rows(self) -> int:
        return len(self._rows.live_rows)

    @_on_stream
    def join(self, groups: Groups | None, while_waiting: Callable[[], None] = lambda: None) -> None:
        """See worker.step.runner.StepRunner."""
        assert self._ranks is not None, "this rank computes alone"
        if groups is None:
            self._ranks.leave()
        else:
            if self.items is not None:
                self.items.encoder.group = groups.tensor
            self._ranks.join(groups, while_waiting)

    @_on_stream
    def reset(self) -> None:
        """Starts a new epoch: waits for steps in flight, drops their results, and forgets every row."""
        if self._in_flight and self._ranks is not None:
            # The steps may wait for a rank that has died, and their results are not wanted.
            self._ranks.leave()
        self._in_flight.clear()
        self._engine.reset()
        self._swap_space.forget()
        self._rows.clear()
        if self._drafter is not None:
            self._drafter.reset()
        if self.items is not None:
            self.items.reset()
        self._unsettled_rows.clear()
        self._failed_sequences.clear()

    @_on_stream
    def begin(self, plan: step_pb2.StepPlan) -> "GpuResult":
        """Queues a step on the device without waiting. The caller checks epoch, step number and digest.

        Raises PlanError, before anything is queued, if the plan contradicts what the rows hold: results of earlier
        steps can still be taken, and then only `reset` may follow.
        """
        rows = self._rows
        if self._ranks is not None:
            self._ranks.begin_step(plan.step)
        if len(self._in_flight) >= self._max_steps_in_flight:
            raise PlanError(
                f"step: {plan.step} comes while {len(self._in_flight)} results are awaited; max_steps_in_flight is "
                f"{self._max_steps_in_flight}"
            )
        swaps = planned_swaps(plan, last_block=self._swap_space.last_block, num_host_blocks=self._swap_space.num_blocks)
        rows.apply(plan)
        if self._drafter is not None:
            self._drafter.note_plan()
            if swaps is not None:
                self._drafter.drop_blocks(swaps.in_blocks)
        self._unsettled_rows.difference_update(rows.changes.freed_rows)
        if self._unsettled_rows:
            self._refuse_unsettled(plan)
        scheduled = rows.schedule(plan)
        if self.items is not None:
            self.items.apply(plan)
        else:
            check_no_items(plan)
        self._swap_space.apply(swaps, rows.changes.block_ids())
        gathered = gather(rows, scheduled)
        step = self._remember(plan, scheduled, gathered)
        begin_masks(rows, step.rows_N, step.num_drafts_N)
        inputs = self._inputs(scheduled, gathered, step)
        self._append_unknown(step)
        result = GpuResult(self, step, self._engine.begin(inputs), self._wanted(plan))
        self._in_flight.append(result)
        return result

    def execute(self, plan: step_pb2.StepPlan) -> step_pb2.StepResult:
        """Begins a step, waits for it, and returns its result."""
        return self.begin(plan).result()

    @_on_stream
    def warm_up(self) -> None:
        """Runs a prefill, a decode and every kind of sampling through the real step, so that everything is compiled and
        allocated for the first request."""
        item = None if self.items is None else self.items.warm_up(self._rows.max_num_batched_tokens)
        for plan in warm_up_plans(self._rows, item, all_kinds=True):
            self.execute(plan)
        self.reset()

    def _refuse_unsettled(self, plan: step_pb2.StepPlan) -> None:
        named = self._unsettled_rows.intersection([*decoding_rows(plan).tolist(), *plan.rows])
        if named:
            raise PlanError(
                f"rows: row {min(named)} is named in step {plan.step}, but an earlier step with drafts of that row, or "
                f"in which it samples under a constraint, is in flight; plan the row again once that step's result is "
                f"taken"
            )

    def _remember(self, plan: step_pb2.StepPlan, scheduled: Scheduled, gathered: Gathered) -> BegunStep:
        rows, drafts_S = self._rows, scheduled.num_drafts_S
        rows_N = scheduled.rows_S[gathered.sampling_N]
        num_drafts_N = None if drafts_S is None else drafts_S[gathered.sampling_N]
        return BegunStep(
            epoch=plan.epoch,
            step=plan.step,
            rows_N=rows_N,
            sequences_N=rows.sequence_R[rows_N],
            positions_N=rows.output_positions(rows_N) - (0 if num_drafts_N is None else num_drafts_N),
            num_drafts_N=num_drafts_N,
            num_logprobs_N=rows.sampling.logprobs_R[rows_N],
            listing_rows=frozenset(rows.sampling.listed),
            prompts=scored_prompts(rows, scheduled.rows_S, gathered.query_starts, gathered.context_lens_S)
            if rows.sampling.scores_prompts
            else (),
            freed_sequences=rows.changes.freed_sequences,
        )

    def _inputs(self, scheduled: Scheduled, gathered: Gathered, step: BegunStep) -> StepInputs:
        changes, num_drafts_N = self._rows.changes, step.num_drafts_N
        return StepInputs(
            rows_S=scheduled.rows_S.astype(np.int32),
            query_starts=gathered.query_starts.astype(np.int32),
            context_lens_S=gathered.context_lens_S.astype(np.int32),
            token_ids_T=gathered.token_ids_T,
            sampling_N=gathered.sampling_N.astype(np.int32),
            output_positions_N=step.positions_N.astype(np.int32),
            num_drafts_N=num_drafts_N.astype(np.int32) if num_drafts_N is not None and num_drafts_N.any() else None,
            prompt_scores=_prompt_scores(step.prompts),
            freed_rows=changes.freed_rows,
            new_rows=changes.new_rows,
            table_changes=changes.table_changes(),
            **self._of_items(scheduled, gathered),
        )

    def _of_items(self, scheduled: Scheduled, gathered: Gathered) -> dict[str, Any]:
        """Returns the fields of StepInputs that rows with items need."""
        items = self._rows.items
        if items is None or not items.has_any:
            return {}
        rows_S = scheduled.rows_S
        fields: dict[str, Any] = {}
        if items.tokens.has_axes:
            fields["rope_shifts_S"] = items.shift_R[rows_S].astype(np.int32)
        step = items.of_step(rows_S, gathered.query_starts, gathered.positions_T)
        if step is not None and step.positions_AT is not None:
            fields["rope_positions_AT"] = step.positions_AT.astype(np.int32)
        if step is not None and step.embedded is not None:
            assert self.items is not None, "rows have items only where there is an encoder"
            fields["embedded_places_M"] = step.embedded.places_M
            fields["embeddings_ME"] = self.items.embeddings(step.embedded)
        return fields

    def _append_unknown(self, step: BegunStep) -> None:
        """Appends one token, which only the device knows, to rows without drafts; rows with drafts become unsettled."""
        constrained = self._rows.sampling.constrained
        if constrained:
            self._unsettled_rows.update(constrained.keys() & set(step.rows_N.tolist()))
        if step.num_drafts_N is None:
            self._rows.append_unknown(step.rows_N)
            return
        self._rows.append_unknown(step.rows_N[step.num_drafts_N == 0])
        self._unsettled_rows.update(step.rows_N[step.num_drafts_N > 0].tolist())

    @_on_stream
    def take(self, result: "GpuResult") -> step_pb2.StepResult:
        """Waits for the step and returns its result. Raises the error that made it fail."""
        assert self._in_flight, "no result is awaited; a reset has dropped it"
        assert self._in_flight[0] is result, "results are taken in the order of the steps"
        outputs, step = result.engine_step.wait(), result.step
        self._in_flight.popleft()
        if step.num_drafts_N is not None:
            self._settle(step, step.num_drafts_N, outputs)
        failed_N = self._failed(step, outputs)
        constrained = self._constrained(step)
        why = {i: self._why(step, outputs, i) for i in constrained if failed_N[i]}
        taken = step.result(outputs, failed_N, why)
        self._unsettled_rows.difference_update(constrained.values())
        going = {i: row for i, row in constrained.items() if not failed_N[i]}
        for i, row in going.items():
            for token in outputs.tokens_ND1[i, : outputs.counts_N[i]].tolist():
                self._rows.sampling.constrained[row].append(token)
        for row, token_ids in find_forced(self._rows, [*going.values()]):
            taken.drafts.add(sequence=int(self._rows.sequence_R[row]), token_ids=token_ids)
        if self._drafter is not None:
            self._write_tokens(step, outputs)
            if result.wanted:
                self._draft(self._drafter, result.wanted, taken)
        # Results of earlier steps, which might name these sequences, were taken before.
        self._failed_sequences.difference_update(step.freed_sequences)
        return taken

    def _wanted(self, plan: step_pb2.StepPlan) -> Sequence[tuple[int, int, int]]:
        """Returns the rows for which the plan asks for drafts, with their sequences and the most drafts of each."""
        if self._drafter is None:
            return ()
        sequences = self._rows.sequence_R[np.array(plan.drafting_rows, np.int64)].tolist()
        return list(zip(plan.drafting_rows, sequences, plan.num_wanted_drafts, strict=True))

    def _write_tokens(self, step: BegunStep, outputs: StepOutputs) -> None:
        """Writes sampled tokens to rows that still hold their sequences: the drafter reads them there."""
        rows, rows_N = self._rows, step.rows_N
        is_held_N = (rows.sequence_R[rows_N] == step.sequences_N) & (rows.num_tokens_R[rows_N] > 0)
        firsts_N = rows.num_prompt_tokens_R[rows_N] + step.positions_N
        for turn in range(outputs.tokens_ND1.shape[1]):
            says = np.flatnonzero(is_held_N & (outputs.counts_N > turn))
            rows.token_ids_RL[rows_N[says], firsts_N[says] + turn] = np.maximum(outputs.tokens_ND1[says, turn], 0)

    def _draft(self, drafter: Drafter, wanted: Sequence[tuple[int, int, int]], result: step_pb2.StepResult) -> None:
        """Proposes what comes after the step's tokens. Rows with forced tokens have their drafts already."""
        start, rows = time.perf_counter(), self._rows
        done = {each.sequence for each in result.drafts} | self._failed_sequences
        held = [
            (row, count)
            for row, sequence, count in wanted
            if rows.sequence_R[row] == sequence and rows.num_tokens_R[row] and sequence not in done
        ]
        for row, token_ids in drafter.propose(held).items():
            result.drafts.add(sequence=int(rows.sequence_R[row]), token_ids=token_ids)
        result.timing.draft = time.perf_counter() - start

    def _failed(self, step: BegunStep, outputs: StepOutputs) -> np.ndarray:
        """Returns which of the step's sampling rows had logits that were not finite, in this step or before."""
        is_said = np.arange(outputs.tokens_ND1.shape[1]) < outputs.counts_N[:, None]
        failed_N = ((outputs.tokens_ND1 < 0) & is_said).any(1)
        if failed_N.any():
            self._failed_sequences.update(step.sequences_N[failed_N].tolist())
        if self._failed_sequences:
            failed_N |= np.isin(step.sequences_N, list(self._failed_sequences))
        return failed_N

    def _constrained(self, step: BegunStep) -> dict[int, int]:
        """Returns the step's sampling rows with a constraint that still hold the same sequence, by index into N."""
        rows = self._rows
        if not rows.sampling.constrained:
            return {}
        return {
            i: row
            for i, (row, sequence) in enumerate(zip(step.rows_N.tolist(), step.sequences_N.tolist(), strict=True))
            if row in rows.sampling.constrained and rows.sequence_R[row] == sequence
        }

    def _why(self, step: BegunStep, outputs: StepOutputs, index: int) -> str:
        """Returns why a row with a constraint has failed."""
        position = int(step.positions_N[index] + outputs.counts_N[index]) - 1
        return self._rows.sampling.why_no_token(int(step.rows_N[index]), position)

    def _settle(self, step: BegunStep, num_drafts_N: np.ndarray, outputs: StepOutputs) -> None:
        """Sets the number of tokens of rows that had drafts, if they still hold the same sequence."""
        rows, rows_N = self._rows, step.rows_N
        is_held_N = (rows.sequence_R[rows_N] == step.sequences_N) & (rows.num_tokens_R[rows_N] > 0)
        settled = np.flatnonzero(is_held_N & (num_drafts_N > 0))
        rows.settle_drafts(rows_N[settled], num_drafts_N[settled])
        rows.append_unknown(rows_N[settled], outputs.counts_N[settled])
        self._unsettled_rows.difference_update(rows_N[settled].tolist())

    def call_when_done(self, result: "GpuResult", callback: Callable[[], None]) -> None:
        self._waiter.call_when_reached(result.engine_step.event, callback)


class GpuResult:
    """A worker.step.runner.PendingResult of a GpuRunner."""

    __slots__ = ("_runner", "engine_step", "step", "wanted")

    def __init__(
        self, runner: GpuRunner, step: BegunStep, engine_step: PendingStep, wanted: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        """wanted: rows that should get drafts, their sequences, and the most drafts of each."""
        self._runner, self.step, self.engine_step, self.wanted = runner, step, engine_step, wanted

    @property
    def is_done(self) -> bool:
        return self.engine_step.is_done

    def result(self) -> step_pb2.StepResult:
        return self._runner.take(self)

    def call_when_done(self, callback: Callable[[], None]) -> None:
        self._runner.call_when_done(self, callback)


def _prompt_scores(prompts: Sequence[ScoredPrompt]) -> PromptScores | None:
    """Concatenates the prompt logprobs that all rows ask for; None: no row asks."""
    tokens_P = [np.arange(len(prompt.targets_P)) + prompt.first_token for prompt in prompts]
    if not any(map(len, tokens_P)):
        return None
    return PromptScores(
        tokens_P=np.concatenate(tokens_P).astype(np.int32),
        targets_P=np.concatenate([prompt.targets_P for prompt in prompts]).astype(np.int32),
        num_top=max(prompt.num_top for prompt in prompts),
    )
