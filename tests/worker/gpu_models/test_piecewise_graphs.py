"""Steps of a small llama in pieces: graphs between attentions, and attention by the step's own plan. The graphs are
recordings, which get a step's inputs only through memory that stays in place."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from triton import knobs

from kernels.linear import Residual
from tests.fakes.gpu.recording_device import RecordingDevice
from tests.support.gpu.gpu_runs import GpuModelRun
from tests.support.gpu.small_llama import small_llama
from worker.device.device import Device, InterpretedDevice
from worker.gpu.graphs import CapturedGraphs, GraphSizes
from worker.sampling.filters import SamplingKind
from worker.step.batch import GpuBatch

pytestmark = [
    pytest.mark.skipif(not knobs.runtime.interpret, reason="a recording is one of the interpreter"),
    # The interpreter's numpy warns about memory that has never been written and about padding rows.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

MOST = 8
SIZES = GraphSizes(pieces=(4, MOST))
# The tokens of each row.
Step = Mapping[int, Sequence[int]]
# Chunks of prompts, decodes beside a chunk, a row that leaves and one that comes.
STEPS: Sequence[Step] = ({0: [5, 9, 11], 2: [7, 7]}, {2: [1], 0: [66]}, {1: [20, 21, 22, 23, 24], 0: [3], 2: [4]})


class Engine:
    """An engine that puts every step's inputs into the same memory."""

    def __init__(self, run: GpuModelRun) -> None:
        self._tables_RB = run.tables_RB
        self._token_ids = torch.full((MOST,), -1, dtype=torch.int32)
        self._positions = torch.zeros(MOST, dtype=torch.int32)
        self._slots = torch.full((MOST,), -1)
        self._padding_row = torch.tensor([-1], dtype=torch.int32)
        self._nothing = torch.zeros(2, dtype=torch.int32)
        self.captured: list[int] = []

    def forward_body(self, size: int, *, drafts: bool = False) -> None:
        raise AssertionError("there are no graphs of decodes")

    def sample_body(self, kind: SamplingKind, size: int, *, drafts: bool = False) -> None:
        raise AssertionError("there are no graphs of decodes")

    def pieces_batch(self, num_tokens: int) -> GpuBatch:
        self.captured.append(num_tokens)
        return self._padding(num_tokens)

    def _padding(self, num_tokens: int) -> GpuBatch:
        return GpuBatch(
            token_ids_T=self._token_ids[:num_tokens],
            positions_T=self._positions[:num_tokens],
            slots_T=self._slots[:num_tokens],
            rows_S=self._padding_row,
            query_starts=self._nothing,
            context_lens_S=self._nothing[:1],
            block_tables_RB=self._tables_RB,
            max_query_len=1,
        )

    def expanded(self, batch: GpuBatch) -> GpuBatch:
        num_tokens = batch.num_tokens
        here = self._padding(num_tokens)
        here.token_ids_T.copy_(batch.token_ids_T)
        here.positions_T.copy_(batch.positions_T)
        here.slots_T.copy_(batch.slots_T)
        return replace(batch, token_ids_T=here.token_ids_T, positions_T=here.positions_T, slots_T=here.slots_T)


def _run() -> GpuModelRun:
    model = small_llama(num_layers=2)
    return GpuModelRun(model, model.backend, block_size=8, num_blocks=4 * 8 + 1, max_rows=4, max_context=64)


def _logits(run: GpuModelRun, batch: GpuBatch, hidden: Residual) -> torch.Tensor:
    with torch.inference_mode():
        return run.executor.logits(hidden[torch.arange(int(batch.query_starts[-1]))])


def _hold_equal(run: GpuModelRun, device: Device, sizes: GraphSizes, steps: Sequence[Step]) -> list[int]:
    """Asserts that steps in pieces equal steps without. Returns the captured sizes, in order."""
    eager, engine = _run(), Engine(run)
    graphs = CapturedGraphs(engine, run.executor, run.kv_cache, device, sizes)  # type: ignore[arg-type]
    graphs.capture()
    assert all(layer.isnan().all() for layer in run.kv_cache.layers), "capturing wrote KV"
    for tokens_of in steps:
        num_tokens = sum(map(len, tokens_of.values()))
        size = graphs.padded_tokens(num_tokens)
        assert size is not None
        batch = run.batch(tokens_of, padded_tokens=size - num_tokens)
        got = _logits(run, batch, graphs.run_pieces(engine.expanded(batch)))
        # Padded, too: a CPU rounds products of other sizes differently.
        same = eager.batch(tokens_of, padded_tokens=size - num_tokens)
        assert torch.equal(got, _logits(eager, same, eager.executor.forward(same, eager.kv_cache)))
    assert graphs.num_in_pieces == len(steps)
    # Bytes are compared because unused slots hold NaN. This also shows that padding did not write to the null block.
    for layer, same in zip(run.kv_cache.layers, eager.kv_cache.layers, strict=True):
        assert torch.equal(layer.view(torch.int32), same.view(torch.int32))
    return engine.captured


def test_steps_in_pieces_equal_steps_without_graphs_bit_for_bit() -> None:
    """Pieces of both sizes, each also after other steps of the same size."""
    device = RecordingDevice()
    assert _hold_equal(_run(), device, SIZES, STEPS) == [8, 4]
    assert len(device.pools) == 2
    assert device.pools[0] is device.pools[1]


def test_a_cpu_repeats_pieces() -> None:
    _hold_equal(_run(), InterpretedDevice(), GraphSizes(pieces=(4,)), STEPS[1:2])
