"""Sequences over a GpuEngine and a model without weights: a minimal runner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protos import step_pb2
from protos.inference_pb2 import SamplingParams
from tests.fakes.fake_model import VOCAB_SIZE
from tests.fakes.fake_runner import fake_runner
from tests.fakes.gpu.gpu_model import FakeGpuModel, fake_kv_cache
from tests.support.gpu.gpu import gpu_device
from tests.support.scheduler.steps import decodes, said
from worker.device.device import Device
from worker.gpu.engine import GpuEngine
from worker.gpu.executor import StepGraphs
from worker.gpu.pending import PendingStep
from worker.sampling.feature import NewRow
from worker.sampling.features import RowSampling, resolve_sampling
from worker.step.inputs import LAST_SAMPLED, PromptScores, StepInputs, TableChanges
from worker.step.inputs import StepOutputs as StepOutputs

BLOCK_SIZE = 8
EOS = 2


def outputs_alone(prompt: Sequence[int], params: SamplingParams, count: int) -> list[int]:
    """The output of a request that a CPU computes alone."""
    runner = fake_runner(max_num_batched_tokens=128)
    num_blocks = -(-(len(prompt) + count) // BLOCK_SIZE)
    new = step_pb2.NewRow(
        row=0,
        sequence=1,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        block_ids=range(1, 1 + num_blocks),
        sampling=params,
    )
    plan = step_pb2.StepPlan(epoch=1, step=1, new_rows=[new], rows=[0], num_tokens=[len(prompt)])
    tokens = said(runner.execute(plan)).token_ids
    while len(tokens) < count:
        tokens += said(runner.execute(step_pb2.StepPlan(epoch=1, step=2, decode_rows=decodes(0)))).token_ids
    return tokens


def row_sampling(row: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> RowSampling:
    new = NewRow(
        sampling=params,
        prompt=_int32(prompt),
        output=_int32(output),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
    )
    return resolve_sampling(row, 0, new)


@dataclass
class EngineSequence:
    prompt: list[int]
    # Output tokens that the host knows.
    output: list[int] = field(default_factory=list)
    # Tokens that the row had when it was added.
    num_given: int = 0
    num_computed: int = 0
    # Tokens that steps in flight sample.
    num_unknown: int = 0
    num_blocks: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        """Includes tokens that steps in flight sample."""
        return len(self.prompt) + len(self.output) + self.num_unknown


class EngineRun:
    """An engine and its rows."""

    def __init__(
        self,
        *,
        device: Device | None = None,
        max_num_seqs: int = 6,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 128,
        max_steps_in_flight: int = 2,
        most_drafts: int = 0,
        graphs: StepGraphs | None = None,
        model: FakeGpuModel | None = None,
    ) -> None:
        self.model, self.kv_cache = model or FakeGpuModel(), fake_kv_cache(num_blocks=256)
        self.engine = GpuEngine(
            self.model,
            self.kv_cache,
            device or gpu_device(),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            max_steps_in_flight=max_steps_in_flight,
            most_drafts=most_drafts,
            graphs=graphs,
        )
        self.rows: dict[int, EngineSequence] = {}
        self._free_blocks = (np.random.default_rng(0).permutation(255) + 1).tolist()
        self._new: list[RowSampling] = []
        self._freed: list[int] = []

    def add(self, row: int, prompt: Sequence[int], params: SamplingParams, output: Sequence[int] = ()) -> None:
        """Adds a row to the next step."""
        self.rows[row] = EngineSequence(list(prompt), list(output), len(prompt) + len(output))
        self._new.append(row_sampling(row, params, prompt, output))

    def free(self, row: int) -> None:
        del self.rows[row]
        self._freed.append(row)

    def begin(
        self,
        num_tokens: Mapping[int, int],
        *,
        drafts: Mapping[int, Sequence[int]] | None = None,
        prompt_scores: PromptScores | None = None,
    ) -> "Begun":
        """Begins a step that computes the next tokens of some rows, followed by drafts."""
        changes: list[tuple[int, int, int]] = []
        token_ids, starts, contexts, sampling, positions, num_drafts = [], [0], [], [], [], []
        for i, (row, count) in enumerate(num_tokens.items()):
            sequence = self.rows[row]
            drafted = list((drafts or {}).get(row, ()))
            end = sequence.num_computed + count
            # The row's sampled tokens are read on the device, even if the host knows them by now.
            given = sequence.tokens[: sequence.num_given]
            known = given + [LAST_SAMPLED] * (sequence.num_tokens - len(given))
            assert end <= len(known)
            token_ids += known[sequence.num_computed : end] + drafted
            starts.append(len(token_ids))
            contexts.append(end + len(drafted))
            while sequence.num_blocks * BLOCK_SIZE < contexts[-1]:
                changes.append((row, sequence.num_blocks, self._free_blocks.pop()))
                sequence.num_blocks += 1
            if end == len(known):
                sampling.append(i)
                positions.append(end - len(sequence.prompt))
                num_drafts.append(len(drafted))
            sequence.num_computed = end
        rows = list(num_tokens)
        inputs = StepInputs(
            rows_S=_int32(rows),
            query_starts=_int32(starts),
            context_lens_S=_int32(contexts),
            token_ids_T=_int32(token_ids),
            sampling_N=_int32(sampling),
            output_positions_N=_int32(positions),
            num_drafts_N=None if drafts is None else _int32(num_drafts),
            prompt_scores=prompt_scores,
            freed_rows=self._freed,
            new_rows=self._new,
            table_changes=TableChanges(
                **dict(zip(("rows_C", "places_C", "block_ids_C"), _int32(changes).T, strict=True))
            )
            if changes
            else None,
        )
        self._new, self._freed = [], []
        sampled = [self.rows[rows[i]] for i in sampling]
        for sequence in sampled:
            sequence.num_unknown += 1
        return Begun(self.engine.begin(inputs), sampled)

    def step(self, num_tokens: Mapping[int, int], **fields: Any) -> StepOutputs:
        """Begins a step and waits for it."""
        return self.begin(num_tokens, **fields).take()

    def run(self, row: int, prompt: Sequence[int], params: SamplingParams, count: int) -> list[int]:
        """Runs one request alone; returns its output."""
        self.add(row, prompt, params)
        self.step({row: len(prompt)})
        while len(self.rows[row].output) < count:
            self.step({row: 1})
        return self.rows[row].output


@dataclass
class Begun:
    pending: PendingStep
    sampled: list[EngineSequence]

    def take(self) -> StepOutputs:
        """Waits for the step and appends its tokens to the sequences."""
        outputs = self.pending.wait()
        for sequence, tokens, count in zip(self.sampled, outputs.tokens_ND1, outputs.counts_N.tolist(), strict=True):
            sequence.output += tokens[:count].tolist()
            sequence.num_unknown -= 1
            sequence.num_computed = max(sequence.num_computed, sequence.num_tokens - 1)
        return outputs


def _int32(values: object) -> np.ndarray:
    return np.array(values, np.int32)
