"""Computes steps on a GPU without waiting for it: a step begins while earlier ones are still in flight.

Shape suffixes: S rows of the batch, T tokens, L scored positions, V vocabulary.
"""

from dataclasses import replace

import numpy as np
import torch

from kernels.attention.plan import HostRows
from kernels.linear.residual import Residual
from kernels.step_inputs.triton import expand
from worker.device.device import Device
from worker.device.staging import Staging, StepLayout, device_memory
from worker.gpu.executor import GpuExecutor, StepGraphs, StepLogits
from worker.gpu.inputs import MixedStep, fill_decodes, fill_rows, fill_shifts, stage_mixed, with_items
from worker.gpu.pending import AskedLogprobs, DeviceRows, PendingStep, ResultLayout
from worker.gpu.sampler import LogitsSlice, Sampler, ScoredPositions, StepSampling
from worker.layers.kv_cache import KVCache
from worker.sampling.filters import SamplingKind
from worker.sampling.gpu_logprobs import SLICE, write_logprobs
from worker.step.batch import GpuBatch
from worker.step.inputs import StepInputs

# Without graphs, steps of more than 64 tokens are padded to multiples of 16: from 65 rows on scaled_mm computes FP8
# GEMMs, if their rows are a multiple of 4, and takes 0.67 to 0.77 of the time of the Triton kernel (measured on an
# H200 at 4,096 rows).
_UNPADDED, _MULTIPLE = 64, 16


class GpuEngine:
    """Permanent rows on the device, and the computation of steps over them.

    All work goes to the device's one stream, in order. A step never waits for the device, except to reuse host memory
    of the step max_steps_in_flight + 1 steps earlier.
    """

    def __init__(
        self,
        model: GpuExecutor,
        kv_cache: KVCache,
        device: Device,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        max_steps_in_flight: int,
        most_drafts: int = 0,
        has_axes: bool = False,
        graphs: StepGraphs | None = None,
    ) -> None:
        """Reserves the model's memory. Inputs are padding until the first step, so the bodies can already be run and
        captured: they change nothing but their own memory. most_drafts: drafts of a row in a step of decodes that the
        bodies compute; steps with more are computed like prefills. has_axes: positions have three axes (M-RoPE)."""
        # May be set or removed between steps.
        self.graphs = graphs
        # Steps begun since the start. Graphs count those that they ran; the others were launched kernel by kernel.
        self.num_steps = 0
        self._model, self._kv_cache, self._device = model, kv_cache, device
        self._vocab_size = vocab_size
        num_logits = most_logits(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self._max_rows, self._most_drafts, self._has_axes = max_num_seqs, most_drafts, has_axes
        layout = StepLayout(
            max_rows=max_num_seqs,
            max_tokens=max_num_batched_tokens,
            max_scored=num_logits if most_drafts else 0,
            has_axes=has_axes,
        )
        self._staging = Staging(device, layout, max_steps_in_flight)
        self._memory = device_memory(device, layout)
        self._arrays = layout.arrays(self._memory)
        gpu, max_blocks = device.torch_device, -(-max_model_len // kv_cache.block_size)
        self._rows = DeviceRows(gpu, max_num_seqs=max_num_seqs, max_blocks=max_blocks)
        self._sampler = Sampler(
            gpu,
            self._rows,
            max_rows=max_num_seqs,
            max_tokens=max_num_batched_tokens,
            vocab_size=vocab_size,
            most_drafts=most_drafts,
        )
        self._token_ids_T = torch.zeros(max_num_batched_tokens, dtype=torch.int32, device=gpu)
        self._positions_T = torch.zeros(max_num_batched_tokens, dtype=torch.int32, device=gpu)
        self._slots_T = torch.zeros(max_num_batched_tokens, dtype=torch.int64, device=gpu)
        self._logits = StepLogits(model, num_logits, vocab_size)
        model.reserve(
            max_tokens=max_num_batched_tokens,
            max_rows=max_num_seqs,
            max_context=max_model_len,
            most_queries=most_drafts + 1,
        )
        self._pad()

    def begin(self, inputs: StepInputs) -> PendingStep:
        """Queues all of a step's work on the device. Earlier steps may still be in flight."""
        with torch.inference_mode():
            return self._begin(inputs)

    def reset(self) -> None:
        """Waits for all steps in flight, and forgets every row. Inputs are padding again."""
        self._staging.clear()
        self._device.synchronize()
        self._sampler.free(range(len(self._arrays.rows_R)))
        self._pad()

    # --- The bodies that graphs are captured from: all in memory at fixed addresses.

    def forward_body(self, size: int, *, drafts: bool = False) -> None:
        """Runs the forward pass of a decode-only step of `size` tokens, with padding: expands what the host sent to the
        batch's tensors, runs the model, and puts its logits where `sample_body` reads them. It reads and writes static
        memory only, so one graph per size serves every step. drafts: rows may have some, up to most_drafts each;
        otherwise each has one token.
        """
        with torch.inference_mode():
            max_query_len = self._most_drafts + 1 if drafts else 1
            batch = self._expanded(self._rows_of(size, drafts), size, max_query_len=max_query_len)
            self._logits.write(self._model.forward(batch, self._kv_cache), size)

    def sample_body(self, kind: SamplingKind, size: int, *, drafts: bool = False) -> None:
        """Chooses the tokens of a decode-only step, verifies its drafts, and stores each row's last token. One graph
        per kind and size."""
        arrays, num_rows = self._arrays, self._rows_of(size, drafts)
        with torch.inference_mode():
            self._choose(kind, size, arrays.sampled_rows_L[:size], arrays.output_positions_L[:size])
            if drafts:
                self._sampler.verify_decodes(
                    arrays.rows_R[:num_rows], arrays.query_starts[: num_rows + 1], arrays.token_ids_T[:size]
                )
            else:
                self._sampler.remember(arrays.rows_R[:num_rows])

    def pieces_batch(self, num_tokens: int) -> GpuBatch:
        """Returns a batch to capture pieces of num_tokens with: one row of padding, in the same memory as the batches
        that `StepGraphs.run_pieces` gets."""
        return self._expanded(1, num_tokens, max_query_len=1)

    # --- A step.

    def _begin(self, inputs: StepInputs) -> PendingStep:
        self.num_steps += 1
        slot = self._staging.next()
        self._sampler.free(inputs.freed_rows)
        new_rows = self._sampler.stage_rows(inputs.new_rows, slot)
        changes = self._rows.stage(inputs, slot)
        scored = ScoredPositions.of(inputs)
        size = self._size_of_decodes(inputs)
        has_drafts = scored.drafts is not None
        sampling = self._sampler.stage(scored, slot, len(self._logits), only_decodes=size is not None)
        num_rows = len(inputs.rows_S) if size is None else self._rows_of(size, has_drafts)
        fill_rows(slot.arrays, inputs, num_rows)
        if self._has_axes:
            fill_shifts(slot.arrays, inputs, num_rows)
        if size is None:
            mixed = stage_mixed(inputs, scored, sampling, slot, self._padded(inputs))
        else:
            mixed = None
            fill_decodes(slot.arrays, scored, sampling, size)
        layout = self._layout_of(inputs, scored, sampling)

        began, ended = self._device.event(), self._device.event()
        began.record()
        slot.send(self._memory, len(inputs.token_ids_T))
        self._rows.apply(changes)
        self._sampler.write_rows(new_rows)
        if layout.is_only_tokens:
            results = self._sampler.tokens_L[: layout.num_rows]
        else:
            results = torch.empty(layout.size, dtype=torch.int32, device=self._memory.device)
        if mixed is None:
            assert size is not None
            self._decode(size, has_drafts, sampling, layout, results)
        else:
            self._compute_mixed(inputs, mixed, sampling, layout, results)
        received = slot.receive(results)
        ended.record()
        pending = PendingStep(began, ended, layout, received)
        slot.wait = pending.wait
        return pending

    def _size_of_decodes(self, inputs: StepInputs) -> int | None:
        """Returns the tokens, with padding, for `forward_body`; None if it can't compute the step."""
        if not inputs.only_decodes_with_drafts or inputs.prompt_scores is not None or inputs.has_items:
            return None
        num_tokens, drafts_N, graphs = len(inputs.token_ids_T), inputs.num_drafts_N, self.graphs
        if drafts_N is not None and (drafts_N.max() > self._most_drafts or num_tokens > len(self._logits)):
            return None
        if graphs is None:
            return _aligned(num_tokens, len(self._logits) if drafts_N is not None else self._max_rows)
        size = graphs.padded(num_tokens) if drafts_N is None else graphs.padded_with_drafts(num_tokens)
        return num_tokens if size is None and graphs.padded_tokens(num_tokens) is None else size

    def _size_of_pieces(self, inputs: StepInputs) -> int | None:
        """Returns the tokens, with padding, of a step that runs in pieces; None: it runs without graphs."""
        if self.graphs is None or inputs.embeddings_ME is not None:
            return None
        return self.graphs.padded_tokens(len(inputs.token_ids_T))

    def _padded(self, inputs: StepInputs) -> int:
        """Returns the tokens, with padding, of a step that does more than decode."""
        num_tokens = len(inputs.token_ids_T)
        return self._size_of_pieces(inputs) or _aligned(num_tokens, len(self._token_ids_T))

    def _rows_of(self, size: int, drafts: bool) -> int:
        """Returns the rows, with padding, of a decode-only step of `size` tokens."""
        return min(size, self._max_rows) if drafts else size

    def _layout_of(self, inputs: StepInputs, scored: ScoredPositions, sampling: StepSampling) -> ResultLayout:
        scores, prompts = inputs.prompt_scores, None
        if scores is not None:
            positions_P = np.arange(len(scores.tokens_P), dtype=np.int64)
            prompts = AskedLogprobs(positions_P, min(scores.num_top, self._vocab_size))
        return ResultLayout(
            num_rows=len(scored.rows_N),
            width=1 if scored.drafts is None else scored.drafts.most + 1,
            has_counts=scored.drafts is not None,
            sampled=sampling.asked,
            prompts=prompts,
        )

    def _decode(
        self, size: int, drafts: bool, sampling: StepSampling, layout: ResultLayout, results: torch.Tensor
    ) -> None:
        forward, sample, graphs = self.forward_body, self.sample_body, self.graphs
        if graphs is not None and (graphs.padded_with_drafts if drafts else graphs.padded)(size) is not None:
            forward, sample = graphs.run_forward, graphs.run_sample
        forward(size, drafts=drafts)
        (part,) = sampling.slices
        if _needs_all_logits(sampling, part):
            self._logits.gather(size)
        logits_LV = self._logits.whole(part.end)
        self._sampler.choose_adjusted(sampling, part, logits_LV)
        sample(sampling.kind, size, drafts=drafts)
        self._sampler.score(part, logits_LV, layout, results)
        if drafts:
            self._sampler.take_verified(layout, results)
        self._sampler.finish(sampling, layout, results)

    def _compute_mixed(
        self,
        inputs: StepInputs,
        mixed: MixedStep,
        sampling: StepSampling,
        layout: ResultLayout,
        results: torch.Tensor,
    ) -> None:
        num_rows = len(inputs.rows_S)
        graphs = None if self._size_of_pieces(inputs) is None else self.graphs
        rows = HostRows(np.diff(inputs.query_starts), inputs.context_lens_S)
        batch = self._expanded(num_rows, self._padded(inputs), max_query_len=int(rows.query_lens.max()))
        batch = replace(batch, host_rows=rows)
        if inputs.has_items:
            batch = with_items(batch, inputs, mixed)
        if graphs is None:
            hidden = self._model.forward(batch, self._kv_cache)
        else:
            hidden = graphs.run_pieces(batch)
        if mixed.scored_tokens_P is not None and mixed.scored_targets_P is not None:
            self._score_prompts(hidden, mixed.scored_tokens_P.tensor, mixed.scored_targets_P.tensor, layout, results)
        for part in sampling.slices:
            place, size = slice(part.start, part.end), part.end - part.start
            self._logits.write(hidden[mixed.tokens_L.tensor[place]], size)
            if _needs_all_logits(sampling, part):
                self._logits.gather(size)
            logits_LV = self._logits.whole(size)
            self._sampler.choose_adjusted(sampling, part, logits_LV)
            self._choose(
                sampling.kind,
                size,
                mixed.sampled_rows_L.tensor[place],
                mixed.output_positions_L.tensor[place],
                first=part.start,
            )
            self._sampler.score(part, logits_LV, layout, results)
        if sampling.drafts is None:
            self._sampler.remember(mixed.rows_N.tensor)
        else:
            self._sampler.verify(sampling, mixed.rows_N.tensor, layout, results)
        self._sampler.finish(sampling, layout, results)

    def _score_prompts(
        self,
        hidden: Residual,
        tokens_P: torch.Tensor,
        targets_P: torch.Tensor,
        layout: ResultLayout,
        results: torch.Tensor,
    ) -> None:
        """Computes prompt logprobs slice by slice, so that a whole prompt's logits never exist at once."""
        logprobs, size = layout.prompts_of(results), min(SLICE, len(self._logits))
        for first in range(0, len(tokens_P), size):
            tokens, targets = tokens_P[first : first + size], targets_P[first : first + size]
            self._logits.write(hidden[tokens], len(tokens))
            self._logits.gather(len(tokens))
            write_logprobs(self._logits.whole(len(tokens)), targets, logprobs, first)

    def _choose(
        self, kind: SamplingKind, size: int, rows_L: torch.Tensor, positions_L: torch.Tensor, first: int = 0
    ) -> None:
        """Chooses tokens from the logits of a slice: `size` positions, the first of which is position `first`."""
        if kind is SamplingKind.GREEDY and self._logits.are_divided:
            self._sampler.take_likeliest(*self._logits.likeliest(size), rows_L, first)
        else:
            self._sampler.choose(kind, self._logits.whole(size), rows_L, positions_L, first)

    def _expanded(self, num_rows: int, num_tokens: int, *, max_query_len: int) -> GpuBatch:
        """Returns the batch that the host has sent, expanded on the device. Both numbers include padding."""
        arrays = self._arrays
        batch = GpuBatch(
            token_ids_T=self._token_ids_T[:num_tokens],
            positions_T=self._positions_T[:num_tokens],
            slots_T=self._slots_T[:num_tokens],
            rows_S=arrays.rows_R[:num_rows],
            query_starts=arrays.query_starts[: num_rows + 1],
            context_lens_S=arrays.context_lens_R[:num_rows],
            block_tables_RB=self._rows.block_tables_RB,
            max_query_len=max_query_len,
        )
        expand(
            batch.rows_S,
            batch.query_starts,
            batch.context_lens_S,
            arrays.token_ids_T[:num_tokens],
            self._rows.last_tokens_R,
            batch.block_tables_RB,
            block_size=self._kv_cache.block_size,
            token_ids_T=batch.token_ids_T,
            positions_T=batch.positions_T,
            slots_T=batch.slots_T,
            shifts_S=arrays.rope_shifts_R[:num_rows] if self._has_axes else None,
        )
        return batch

    def _pad(self) -> None:
        self._memory.zero_()
        self._arrays.rows_R.fill_(-1)
        self._arrays.sampled_rows_L.fill_(-1)


def most_logits(*, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Positions whose logits exist at once: enough for most steps; larger ones take several slices."""
    return min(max(max_num_seqs, SLICE), max_num_batched_tokens)


def _aligned(num_tokens: int, most: int) -> int:
    if num_tokens <= _UNPADDED:
        return num_tokens
    return min(-(-num_tokens // _MULTIPLE) * _MULTIPLE, most)


def _needs_all_logits(sampling: StepSampling, part: LogitsSlice) -> bool:
    """Returns True if logits of a vocabulary that ranks share must be gathered. Greedy rows only need each rank's
    likeliest token."""
    return sampling.kind is not SamplingKind.GREEDY or bool(part.adjusted or part.asked)
