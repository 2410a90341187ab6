"""Computes steps on a CPU: a plan in, a result out. It uses no sockets, so a benchmark or a library can call it
in-process.
"""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from kernels.kv_cache.swap import block_copy
from kernels.native.library import NativeKernels
from kernels.step_inputs.native import DecodeRowsStruct, DecodesStruct, SampledTokensStruct
from protos import inference_pb2, step_pb2
from worker.cpu.executor import CpuExecutor
from worker.cpu.stage_traffic import ExpectedStep, StageTraffic
from worker.encoders.items import Items, check_no_items
from worker.errors import PlanError
from worker.layers.kv_cache import KVCache
from worker.models.drafting.drafter import Drafter
from worker.parallel.groups import Groups
from worker.sampling.logprobs import frames, token_logprobs
from worker.sampling.sampler import Greedy, Logits, Scores
from worker.step.batch import InputBatch, build_batch, put_items
from worker.step.inputs import BatchRows
from worker.step.masks import begin_masks, find_forced, step_masks
from worker.step.results import ScoredPrompt, StepTokens, put_columns, sample_rows, scored_prompts
from worker.step.rows import Rows, planned_swaps
from worker.step.runner import DoneResult
from worker.step.warm_up import warm_up_plans


class Decodes:
    """Prepares and finishes steps whose rows all decode, with or without drafts, in C++.

    Native kernels read and write the arrays of rows and batch.
    """

    def __init__(self, kernels: NativeKernels, rows: Rows, batch: InputBatch) -> None:
        # Keeps the rows' arrays alive: the struct below holds their addresses.
        self._kernels, self._rows, self._batch = kernels, rows, batch
        most_rows = min(batch.max_rows, batch.max_tokens)
        self._sequences = np.zeros(most_rows, "<i8")
        self._positions = np.zeros(most_rows, "<i4")
        self._counts = np.zeros(most_rows, "<i4")
        self._token_ids = np.zeros(batch.max_tokens, "<i4")
        self._said = SampledTokensStruct(
            sequences=_address(self._sequences, np.int64),
            positions=_address(self._positions, np.int32),
            counts=_address(self._counts, np.int32),
            token_ids=_address(self._token_ids, np.int32),
        )
        self._struct = DecodeRowsStruct(
            token_ids=_address(rows.token_ids_RL, np.int32),
            block_ids=_address(rows.block_ids_RB, np.int32),
            num_blocks=_address(rows.num_blocks_R, np.int64),
            num_tokens=_address(rows.num_tokens_R, np.int64),
            num_prompt_tokens=_address(rows.num_prompt_tokens_R, np.int64),
            num_computed_tokens=_address(rows.num_computed_tokens_R, np.int64),
            sequences=_address(rows.sequence_R, np.int64),
            failed=_address(rows.failed_R, np.bool_),
            num_rows=rows.max_num_seqs,
            token_stride=rows.token_ids_RL.shape[1],
            block_stride=rows.block_ids_RB.shape[1],
            block_size=rows.block_size,
            max_model_len=rows.max_model_len,
            batch_token_ids=_address(batch.token_ids, np.int64),
            positions=_address(batch.positions, np.int64),
            slots=_address(batch.slots, np.int64),
            query_starts=_address(batch.starts, np.int32),
            context_lens=_address(batch.context_lens, np.int32),
            block_tables=_address(batch.block_tables, np.int32),
            logit_indices=_address(batch.logit_places, np.int64),
            most_rows=most_rows,
            most_tokens=batch.max_tokens,
            table_stride=batch.max_blocks,
        )
        self._step = DecodesStruct()
        self._all, self._named = ctypes.addressof(self._struct), ctypes.addressof(self._step)
        self._said_address = ctypes.addressof(self._said)
        # Cached from the previous step: the next one mostly has the same rows. The arrays are those of `_step`.
        self._decode_rows = b""
        self._rows_u2 = np.empty(0, "<u2")
        self._batch_rows = BatchRows(rows_S=np.empty(0, np.int64), rows_N=np.empty(0, np.int64), all_decode=True)
        self._drafts = np.empty(0, np.int64)

    def begin(self, plan: step_pb2.StepPlan) -> BatchRows | None:
        """Fills the batch from a plan whose rows all decode, and counts its tokens, with drafts, as computed.

        Returns None, and changes nothing, if the plan also has other rows or is invalid: `Rows.schedule` then reports
        what is wrong.
        """
        if plan.rows or plan.num_tokens or len(plan.decode_rows) % 2:
            return None
        if plan.rows_with_drafts or plan.num_drafts or plan.draft_token_ids:
            num_drafts_S = self._name_with_drafts(plan)
            if num_drafts_S is None:
                return None
        else:
            num_drafts_S = None
            if plan.decode_rows != self._decode_rows or self._batch_rows.num_drafts_N is not None:
                self._name(np.frombuffer(plan.decode_rows, "<u2"), None)
                self._decode_rows = plan.decode_rows
        batch, num_rows = self._batch, len(self._rows_u2)
        num_blocks = self._kernels.begin_decodes(self._all, self._named)
        if not num_blocks:
            return None
        num_tokens = num_rows if num_drafts_S is None else num_rows + len(self._drafts)
        batch.num_rows, batch.num_blocks = num_rows, num_blocks
        batch.num_tokens = batch.num_logits = num_tokens
        return self._batch_rows

    def _name(self, rows_u2: np.ndarray, num_drafts_S: np.ndarray | None) -> None:
        """Makes these the rows of the step."""
        rows = rows_u2.astype(np.int64)
        self._rows_u2 = rows_u2
        self._batch_rows = BatchRows(rows_S=rows, rows_N=rows, num_drafts_N=num_drafts_S, all_decode=True)
        self._step.rows, self._step.count = rows_u2.ctypes.data, len(rows_u2)
        self._step.num_drafts = None if num_drafts_S is None else num_drafts_S.ctypes.data
        self._step.drafts = None if num_drafts_S is None else self._drafts.ctypes.data

    def _name_with_drafts(self, plan: step_pb2.StepPlan) -> np.ndarray | None:
        """Returns the drafts of each row; None if they are invalid."""
        num_rows, num_drafts = len(plan.rows_with_drafts) // 2, len(plan.draft_token_ids) // 4
        are_whole = len(plan.rows_with_drafts) == 2 * num_rows and len(plan.draft_token_ids) == 4 * num_drafts
        if not are_whole or len(plan.num_drafts) != 4 * num_rows or not num_rows or not num_drafts:
            return None
        counts, drafts = np.frombuffer(plan.num_drafts, "<i4"), np.frombuffer(plan.draft_token_ids, "<i4")
        if counts.min() < 1 or counts.sum() != num_drafts or drafts.min() < 0 or drafts.max() >= self._rows.vocab_size:
            return None
        self._drafts = drafts.astype(np.int64)
        num_drafts_S = np.zeros(len(plan.decode_rows) // 2 + num_rows, np.int64)
        num_drafts_S[-num_rows:] = counts
        self._name(np.frombuffer(plan.decode_rows + plan.rows_with_drafts, "<u2"), num_drafts_S)
        return num_drafts_S

    def end(self, scores: Greedy, result: step_pb2.StepResult) -> bool:
        """Appends the likeliest tokens to the rows of the latest step, up to and including the first that differs from
        its draft, and puts them into its result.

        Returns False, and changes nothing, if a row has failed: its logits were not finite, in this step or before.
        """
        num_said = self._kernels.end_decodes(
            self._all, self._named, scores.token_ids_L.data_ptr(), scores.largest_L.data_ptr(), self._said_address
        )
        if not num_said:
            return False
        num_rows = self._batch.num_rows
        result.sequences = self._sequences[:num_rows].tobytes()
        result.positions = self._positions[:num_rows].tobytes()
        result.token_ids = self._token_ids[:num_said].tobytes()
        if self._batch_rows.num_drafts_N is not None:
            result.num_tokens = self._counts[:num_rows].tobytes()
        return True

    @property
    def tokens_ND1(self) -> np.ndarray:
        """The tokens that each row sampled in the latest step, int64, with zeros behind them."""
        counts_N = self.counts_N
        tokens_ND1 = np.zeros((len(counts_N), int(counts_N.max())), np.int64)
        tokens_ND1[np.arange(tokens_ND1.shape[1]) < counts_N[:, None]] = self._token_ids[: counts_N.sum()]
        return tokens_ND1

    @property
    def counts_N(self) -> np.ndarray:
        """The number of these tokens, int64."""
        return self._counts[: self._batch.num_rows].astype(np.int64)


def _address(array: np.ndarray, dtype: type[np.generic]) -> int:
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    return array.ctypes.data


class SwapSpace:
    """Host blocks for swapped KV, numbered from 0; each spans all layers of the KV cache. Free blocks hold garbage."""

    def __init__(self, kv_cache: KVCache, num_blocks: int, more_layers: Sequence[torch.Tensor] = ()) -> None:
        """Reserves address space; most systems commit a page of memory only when it is first written. more_layers: have
        the cache's block numbers and are swapped with it."""
        self._layers = [*kv_cache.layers, *more_layers]
        self._last_block, self.num_blocks = kv_cache.num_blocks - 1, num_blocks
        self._hosts = [torch.empty((num_blocks, *layer.shape[1:]), dtype=layer.dtype) for layer in self._layers]

    def apply(self, plan: step_pb2.StepPlan) -> None:
        """Copies a plan's blocks out to the host, then others in. Raises PlanError before it copies anything."""
        swaps = planned_swaps(plan, last_block=self._last_block, num_host_blocks=self.num_blocks)
        if swaps is None:
            return
        sources_out, targets_out = torch.from_numpy(swaps.out_blocks), torch.from_numpy(swaps.out_host_blocks)
        sources_in, targets_in = torch.from_numpy(swaps.in_host_blocks), torch.from_numpy(swaps.in_blocks)
        for layer, host in zip(self._layers, self._hosts, strict=True):
            block_copy(layer, host, sources_out, targets_out)
            block_copy(host, layer, sources_in, targets_in)


def _check_states(plan: step_pb2.StepPlan, block_size: int) -> None:
    """Raises PlanError for what states cannot do: a block holds that after its last computed token, and no other."""
    if plan.rows_with_drafts:
        raise PlanError(
            "rows_with_drafts: the layers carry a state from token to token, which cannot go back over a draft"
        )
    for new in plan.new_rows:
        if new.num_computed_tokens % block_size:
            raise PlanError(
                f"new_rows: row {new.row} has num_computed_tokens={new.num_computed_tokens}: layers that carry a state "
                f"go on at whole blocks of {block_size} tokens"
            )


# The most rows of a step whose result waits for the forced tokens after it. Results of larger steps have those that
# the masks of the step before have shown: see `python -m benchmarks.engine.constrained_step`.
_MOST_FORCED_ROWS = 8
# Prompt positions whose logits exist at once: 64 x 49,152 in float32 are 12 MiB.
_LOGITS_SLICE = 64
_NOTHING = StepTokens.one_each(np.empty(0, np.int64))


class Runner:
    """One rank's model, KV cache and rows. `worker.process.build.build_runner` makes one from options."""

    # It knows each token before it begins the next step.
    holds_constrained = False

    def __init__(
        self,
        model: CpuExecutor,
        kv_cache: KVCache,
        rows: Rows,
        model_info: inference_pb2.ModelInfo,
        *,
        num_swap_blocks: int = 0,
        without_others: Groups | None = None,
        max_steps_in_flight: int = 1,
        drafter: Drafter | None = None,
        items: Items | None = None,
    ) -> None:
        """without_others: stands in for this rank's groups until it joins some; None: there are no other ranks.
        max_steps_in_flight: steps that may be under way across all stages. drafter: only where results are sent. items:
        only on ranks that encode them."""
        self._model, self._kv_cache, self._rows = model, kv_cache, rows
        more_layers = () if drafter is None else drafter.swapped_layers
        self._layers = [*kv_cache.layers, *more_layers]
        self._swap_space = SwapSpace(kv_cache, num_swap_blocks, more_layers)
        self._batch = InputBatch(
            max_tokens=rows.max_num_batched_tokens,
            max_rows=rows.max_num_seqs,
            max_blocks=rows.block_ids_RB.shape[1],
            has_axes=rows.items is not None and rows.items.tokens.has_axes,
        )
        kernels = model.backend.native
        self._decodes = None if kernels is None else Decodes(kernels, rows, self._batch)
        self._without_others, self._max_steps_in_flight = without_others or Groups(), max_steps_in_flight
        model.groups = self._without_others
        self._is_alone = model.groups.is_alone
        self._traffic = self._new_traffic()
        self._drafter = drafter
        self.items = items
        self._share_items()
        # Sent to the scheduler in Ready.
        self.model_info = model_info

    @property
    def num_swap_blocks(self) -> int:
        """Host blocks for swapped KV."""
        return self._swap_space.num_blocks

    @property
    def drafter(self) -> str:
        """See worker.step.runner.StepRunner."""
        return "" if self._drafter is None else self._drafter.name

    def join(self, groups: Groups | None, while_waiting: Callable[[], None] = lambda: None) -> None:
        """See worker.step.runner.StepRunner."""
        self._model.groups.leave()
        self._model.groups = groups or self._without_others
        self._is_alone = self._model.groups.is_alone
        self._share_items()
        self._traffic = self._new_traffic()

    def _share_items(self) -> None:
        if self.items is not None:
            self.items.encoder.group = self._model.groups.tensor

    @property
    def num_live_rows(self) -> int:
        return len(self._rows.live_rows)

    def reset(self) -> None:
        """Starts a new epoch: forgets every row and the contents of all blocks."""
        self._rows.clear()
        if self._drafter is not None:
            self._drafter.reset()
        if self.items is not None:
            self.items.reset()
        self._scrub(self._rows.take_spoiled_blocks())
        self._traffic = self._new_traffic()

    def begin(self, plan: step_pb2.StepPlan) -> DoneResult:
        """Computes the step at once; see `execute`."""
        return DoneResult(self.execute(plan))

    def expect(self, plan: step_pb2.StepPlan) -> ExpectedStep | None:
        """Begins to receive what other stages send for a step. May be called on any thread, in the order of steps."""
        return None if self._traffic is None else self._traffic.expect(plan)

    def execute(self, plan: step_pb2.StepPlan, expected: ExpectedStep | None = None) -> step_pb2.StepResult:
        """Computes one step. The caller checks epoch, step number and digest. expected: the result of `expect`, if it
        was called.

        Raises PlanError if the plan contradicts what the rows hold; then only `reset` may follow. Raises
        CollectiveError if another rank is gone.
        """
        arrival = time.perf_counter()
        rows, traffic = self._rows, self._traffic
        if not self._is_alone:
            self._model.groups.begin_step(plan.step)
        if traffic is not None:
            expected = expected or traffic.expect(plan)
            traffic.settle(plan)
        if self.model_info.carries_states:
            _check_states(plan, rows.block_size)
        self._swap_space.apply(plan)
        rows.apply(plan)
        if rows.items is not None or plan.encoded_items:
            self._encode(plan)
        if self._drafter is not None:
            self._drafter.note_plan()
            if plan.swap_in_blocks:
                self._drafter.drop_blocks(np.array(plan.swap_in_blocks, np.int64))
        self._scrub(rows.take_spoiled_blocks())
        batch_rows = self._fill_batch(plan)
        if self._batch.embedded is not None and self.items is not None:
            self._batch.embeddings_ME = self.items.embeddings(self._batch.embedded)
        result = step_pb2.StepResult(epoch=plan.epoch, step=plan.step)
        if self._in_lockstep:
            self._batch.num_tokens_D = self._tokens_of_all()
            result.num_tokens_of_all = sum(self._batch.num_tokens_D)
        if expected is not None and expected.stream is not None:
            stream_TE = expected.stream.wait()
            self._model.incoming(len(stream_TE)).copy_(stream_TE)
        before_forward = time.perf_counter()
        is_last = traffic is None or traffic.is_last
        if is_last and rows.sampling.constrained:
            begin_masks(rows, batch_rows.rows_N, batch_rows.num_drafts_N)
        scores = self._compute(batch_rows, result) if is_last else None
        hidden_TE = None if is_last else self._model.forward(self._batch, self._kv_cache)
        after_forward = time.perf_counter()
        sampled = _NOTHING if scores is None else self._sample(batch_rows, scores, result)
        if traffic is not None and expected is not None:
            if hidden_TE is None:
                traffic.tell(plan, batch_rows, sampled)
            else:
                traffic.pass_on(plan, expected, batch_rows, hidden_TE)
        after_sample, timing = time.perf_counter(), result.timing
        timing.forward = after_forward - before_forward
        timing.sample = after_sample - after_forward
        if self._drafter is not None:
            self._drafter.note_step(self._batch, batch_rows.rows_S)
            if plan.drafting_rows:
                before_drafts = time.perf_counter()
                self._draft(self._drafter, plan, result)
                timing.draft = time.perf_counter() - before_drafts
        timing.total = time.perf_counter() - arrival
        return result

    def warm_up(self) -> None:
        """Runs a prefill and a decode through the real step, so that everything is allocated for the first request."""
        item = None if self.items is None else self.items.warm_up(self._rows.max_num_batched_tokens)
        for plan in warm_up_plans(self._rows, item):
            self.execute(plan)
        self.reset()

    def _new_traffic(self) -> StageTraffic | None:
        """Returns the traffic of a new epoch, or None if there is only one stage."""
        link = self._model.groups.pipeline
        if link is None:
            return None
        return StageTraffic(
            link, self._rows, hidden_size=self._model.hidden_size, max_steps_in_flight=self._max_steps_in_flight
        )

    def _fill_batch(self, plan: step_pb2.StepPlan) -> BatchRows:
        if self._decodes is not None and (batch_rows := self._decodes.begin(plan)) is not None:
            if self._rows.items is not None:
                put_items(self._rows.items, batch_rows.rows_S, self._batch)
            return batch_rows
        scheduled = self._rows.schedule(plan, may_be_empty=self._in_lockstep)
        return build_batch(self._rows, scheduled, self._batch)

    def _encode(self, plan: step_pb2.StepPlan) -> None:
        if self.items is not None:
            self.items.apply(plan)
        elif self._traffic is None or self._traffic.is_first:
            check_no_items(plan)

    @property
    def _in_lockstep(self) -> bool:
        """True if other replicas compute the step, too."""
        return self._model.groups.data.size > 1

    def _tokens_of_all(self) -> list[int]:
        return self._model.groups.data.gather(torch.tensor([self._batch.num_tokens]))[:, 0].tolist()

    def _compute(self, batch_rows: BatchRows, result: step_pb2.StepResult) -> Scores | None:
        """Runs the forward pass, and puts prompt logprobs into the result. Returns None if no row samples.

        Computes logits for all sampling rows or for none: reading the head's weights twice would cost more than the
        logits that some rows do not need.
        """
        state, batch = self._rows.sampling, self._batch
        scoring = []
        if state.scores_prompts:
            scoring = scored_prompts(self._rows, batch_rows.rows_S, batch.query_starts, batch.context_lens_S)
        if batch.num_logits and not scoring and not state.needs_logits(batch_rows.rows_N):
            if not state.constrains(batch_rows.rows_N):
                token_ids_L, largest_L = self._model.greedy(batch, self._kv_cache)
                return Greedy(token_ids_L=token_ids_L, largest_L=largest_L)
            if self._model.groups.tensor.size == 1:
                token_ids_L, largest_L = self._model.masked_greedy(
                    batch, self._kv_cache, lambda: step_masks(self._rows, batch_rows.rows_N, batch_rows.num_drafts_N)
                )
                return Greedy(token_ids_L=token_ids_L, largest_L=largest_L)
        if scoring:
            hidden_TE = self._model.forward(batch, self._kv_cache)
            for prompt in scoring:
                result.prompt_logprobs.extend(self._prompt_logprobs(prompt, hidden_TE))
            hidden_LE = hidden_TE[batch.logit_indices]
        else:
            hidden_LE = self._model.wanted(batch, self._kv_cache)
        return Logits(logits_LV=self._model.logits(hidden_LE).numpy()) if batch.num_logits else None

    def _sample(self, batch_rows: BatchRows, scores: Scores, result: step_pb2.StepResult) -> StepTokens:
        rows, rows_N, drafts_N = self._rows, batch_rows.rows_N, batch_rows.num_drafts_N
        decodes = self._decodes if batch_rows.all_decode else None
        if decodes is not None and isinstance(scores, Greedy) and decodes.end(scores, result):
            sampled = self._step_tokens(decodes, batch_rows)
            if rows.sampling.constrained:
                for turn, tokens_N in enumerate(sampled.tokens_ND1.T):
                    has_one = sampled.counts_N > turn
                    rows.sampling.append_all(rows_N[has_one], tokens_N[has_one])
                self._put_forced(rows_N, result)
            return sampled
        sampled = sample_rows(rows, rows_N, drafts_N, scores, self._model.backend.native)
        rows.failed_R[rows_N] |= sampled.failed_N
        failed_N = rows.failed_R[rows_N]
        put_columns(
            result,
            rows.sequence_R[rows_N],
            rows.output_positions(rows_N) - sampled.counts_N,
            sampled.tokens_ND1,
            None if drafts_N is None else sampled.counts_N,
            failed_N,
            sampled.why,
        )
        # A row that failed after some of its drafts reports the tokens before.
        num_kept_N = sampled.counts_N - failed_N
        result.logprobs.extend(sampled.logprobs[key] for key in sorted(sampled.logprobs) if key[1] < num_kept_N[key[0]])
        self._put_forced(rows_N[~failed_N], result)
        return sampled

    def _put_forced(self, rows_N: np.ndarray, result: step_pb2.StepResult) -> None:
        """Proposes the tokens that must come next, and starts to compute the next masks: while Python ends this step
        and begins the next one, cores are free."""
        looks = len(rows_N) <= _MOST_FORCED_ROWS
        for row, token_ids in find_forced(self._rows, rows_N.tolist(), looks=looks):
            result.drafts.add(sequence=int(self._rows.sequence_R[row]), token_ids=token_ids)

    def _draft(self, drafter: Drafter, plan: step_pb2.StepPlan, result: step_pb2.StepResult) -> None:
        """Proposes what comes after the step's tokens. Rows with forced tokens have their drafts already."""
        rows, sequences = self._rows, {each.sequence for each in result.drafts}
        wanted = [
            (row, count)
            for row, count in zip(plan.drafting_rows, plan.num_wanted_drafts, strict=True)
            if rows.num_tokens_R[row] and int(rows.sequence_R[row]) not in sequences
        ]
        for row, token_ids in drafter.propose(wanted).items():
            result.drafts.add(sequence=int(rows.sequence_R[row]), token_ids=token_ids)

    def _step_tokens(self, decodes: Decodes, batch_rows: BatchRows) -> StepTokens:
        """Returns what other stages, and rows with a constraint, must know of a step that was finished in C++."""
        if self._traffic is None and not self._rows.sampling.constrained:
            return _NOTHING
        num_rows = len(batch_rows.rows_N)
        return StepTokens(
            tokens_ND1=decodes.tokens_ND1, counts_N=decodes.counts_N, failed_N=np.zeros(num_rows, np.bool_)
        )

    def _prompt_logprobs(self, prompt: ScoredPrompt, hidden_TE: torch.Tensor) -> Iterator[step_pb2.RowPromptLogprobs]:
        hidden_PE = hidden_TE[prompt.first_token : prompt.first_token + len(prompt.targets_P)]
        logprobs: list[inference_pb2.TokenLogprobs] = []
        for offset in range(0, len(hidden_PE), _LOGITS_SLICE):
            part = prompt.targets_P[offset : offset + _LOGITS_SLICE].tolist()
            logits = self._model.logits(hidden_PE[offset : offset + len(part)]).numpy()
            logprobs += [
                token_logprobs(logits_V, token, prompt.num_top) for logits_V, token in zip(logits, part, strict=True)
            ]
        for frame in frames(prompt.first_position, logprobs):
            yield step_pb2.RowPromptLogprobs(sequence=prompt.sequence, frame=frame)

    def _scrub(self, blocks: np.ndarray) -> None:
        """Zeros blocks that may hold NaN: attention gives masked entries weight 0, and 0 * NaN is NaN."""
        if len(blocks):
            for layer in self._layers:
                layer[torch.from_numpy(blocks)] = 0
