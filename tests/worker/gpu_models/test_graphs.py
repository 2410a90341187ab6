"""The whole engine with a small llama in graphs: full graphs for decodes, with padding, and pieces for other steps.
The graphs are recordings, which get a step's inputs only through memory that stays in place."""

from collections.abc import Mapping

import pytest
import torch
from triton import knobs

from protos.inference_pb2 import SamplingParams
from tests.fakes.gpu.recording_device import RecordingDevice
from tests.support.gpu.gpu_engine import Begun, EngineRun
from tests.support.gpu.small_llama import VOCABULARY, small_llama
from worker.device.device import Device, InterpretedDevice
from worker.gpu.engine import GpuEngine
from worker.gpu.executor import GpuExecutor
from worker.gpu.graphs import CapturedGraphs, GraphSizes
from worker.layers.kv_cache import KVCache

pytestmark = [
    pytest.mark.skipif(not knobs.runtime.interpret, reason="a recording is one of the interpreter"),
    # The interpreter's numpy warns about memory that has never been written and about padding rows.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

SIZES = GraphSizes(decodes=(2, 4), drafts=(4, 8), pieces=(8,))


class LlamaRun(EngineRun):
    def __init__(self, device: Device, sizes: GraphSizes) -> None:
        super().__init__()
        model = small_llama(num_layers=1)
        self.kv_cache = KVCache(model.config, num_blocks=256, block_size=8, backend=model.backend)
        # Slots that hold no token must not be read.
        for layer in self.kv_cache.layers:
            layer.fill_(torch.nan)
        executor = GpuExecutor(model)
        self.engine = GpuEngine(
            executor,
            self.kv_cache,
            device,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=32,
            vocab_size=VOCABULARY,
            max_steps_in_flight=2,
            most_drafts=2,
        )
        self.graphs = CapturedGraphs(self.engine, executor, self.kv_cache, device, sizes)
        self.graphs.capture()
        assert all(layer.isnan().all() for layer in self.kv_cache.layers), "capturing wrote KV"
        self.engine.graphs = self.graphs
        self.begun: list[Begun] = []

    def next(self, num_tokens: Mapping[int, int]) -> None:
        """Begins a step. Results are taken only at the end: tokens pass from step to step on the device."""
        self.begun.append(self.begin(num_tokens))

    def tokens(self) -> list[list[list[int]]]:
        return [begun.take().tokens_ND1.tolist() for begun in self.begun]


def _compute(run: LlamaRun) -> list[list[list[int]]]:
    greedy = SamplingParams(ignore_eos=True)
    run.add(0, [5, 9, 11], greedy)
    run.add(1, [7, 7], SamplingParams(ignore_eos=True, temperature=1.5, seed=3))
    run.add(2, [60], SamplingParams(ignore_eos=True, temperature=1.5, top_k=9, seed=4))
    run.next({0: 3, 1: 2, 2: 1})
    run.next({2: 1, 0: 1, 1: 1})
    run.next({0: 1, 1: 1})
    run.next({0: 1})
    # Its last token was sampled two steps earlier, at another place in the batch.
    run.next({1: 1})
    run.free(0)
    run.add(3, [1, 2], greedy)
    run.next({3: 2, 1: 1, 2: 1})
    run.next({2: 1, 3: 1, 1: 1})
    return run.tokens()


def test_drafts_in_graphs_change_no_token() -> None:
    def compute(run: LlamaRun, drafts: dict[int, list[int]]) -> list[list[int]]:
        run.add(0, [5, 9, 11], SamplingParams(ignore_eos=True))
        run.add(1, [7, 7], SamplingParams(ignore_eos=True, temperature=1.5, seed=3))
        run.step({0: 3, 1: 2})
        while min(len(run.rows[row].output) for row in (0, 1)) < 8:
            following = {row: tokens[len(run.rows[row].output) :][:2] for row, tokens in drafts.items()}
            run.step({1: 1, 0: 1}, drafts=following or None)
        return [run.rows[row].output[:8] for row in (0, 1)]

    eager = compute(LlamaRun(InterpretedDevice(), GraphSizes()), {})
    run = LlamaRun(RecordingDevice(), SIZES)
    # Row 0's third draft is wrong.
    wrong = [*eager[0][:3], (eager[0][3] + 1) % VOCABULARY, *eager[0][4:]]
    assert compute(run, {0: wrong, 1: eager[1]}) == eager
    assert run.graphs.num_full == run.engine.num_steps - 1
    assert run.engine.num_steps < 8


def test_steps_in_graphs_say_and_write_what_steps_without_do() -> None:
    run, eager = LlamaRun(RecordingDevice(), SIZES), LlamaRun(InterpretedDevice(), GraphSizes())
    assert _compute(run) == _compute(eager)
    assert (run.graphs.num_full, run.graphs.num_in_pieces, run.engine.num_steps) == (5, 2, 7)
    assert (eager.graphs.num_full, eager.graphs.num_in_pieces, eager.engine.num_steps) == (0, 0, 7)
    for layer, same in zip(run.kv_cache.layers, eager.kv_cache.layers, strict=True):
        # A CPU rounds products of padded batches differently.
        torch.testing.assert_close(layer, same, rtol=1e-4, atol=1e-5, equal_nan=True)
