"""The GPU's engine with steps in flight: the host waits for none of them, tokens stay on the device, and memory that
the device may still read or write is not touched. Steps that only decode run as graphs would."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kernels.linear.residual import Residual
from protos.inference_pb2 import SamplingParams
from tests.fakes.gpu.gpu_model import FakeGpuModel
from tests.support.gpu.gpu import DEVICE, gpu_device
from tests.support.gpu.gpu_engine import Begun, EngineRun, outputs_alone
from worker.device.device import Event, InterpretedDevice
from worker.device.staging import Staging, StepLayout, device_memory
from worker.gpu.executor import PiecewiseGraph
from worker.layers.kv_cache import KVCache
from worker.sampling.filters import SamplingKind
from worker.step.batch import GpuBatch
from worker.step.inputs import PromptScores

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU, events do not wait until a test asks")

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
# Here the next token depends on earlier ones in more than one way.
PENALISED = SamplingParams(temperature=0.0, frequency_penalty=0.9, logit_bias={30: 7.0, 31: 6.0})
DRAWN = SamplingParams(temperature=1.0, seed=11, logprobs=1)


class LateEvent:
    """An event that passes only when it is waited for."""

    def __init__(self) -> None:
        self.is_passed = False

    def record(self) -> None:
        self.is_passed = False

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        self.is_passed = True

    def seconds_since(self, earlier: Self) -> float:
        assert self.is_passed
        return 0.25


class LateDevice(InterpretedDevice):
    def event(self) -> Event:
        return LateEvent()


@pytest.mark.parametrize("in_flight", [2, 3])
def test_tokens_pass_from_step_to_step_on_the_device(in_flight: int) -> None:
    """Every decode begins before the host has waited for the previous one, so the host knows no input token."""
    run = EngineRun(device=LateDevice(), max_steps_in_flight=in_flight)
    rows = {0: GREEDY, 3: PENALISED, 4: DRAWN}
    for row, params in rows.items():
        run.add(row, PROMPT, params)
    under_way = [run.begin(dict.fromkeys(rows, 11))]
    for _ in range(9):
        under_way.append(run.begin(dict.fromkeys(rows, 1)))
        if len(under_way) == in_flight:
            assert not any(begun.pending.is_done for begun in under_way)
            assert all(sequence.num_unknown == in_flight for sequence in run.rows.values())
            under_way.pop(0).take()
    for begun in under_way:
        assert begun.take().seconds == 0.25
        assert begun.pending.is_done
    for row, params in rows.items():
        assert run.rows[row].output == outputs_alone(PROMPT, params, 10), row


def test_a_row_that_is_taken_over_while_its_last_step_runs() -> None:
    """The new row's prompt is computed beside a decode; the old row's output does not become its own."""
    run = EngineRun(device=LateDevice(), max_steps_in_flight=3)
    run.add(0, PROMPT, PENALISED)
    run.add(1, PROMPT, GREEDY)
    under_way = [run.begin({0: 11, 1: 11}), run.begin({0: 1, 1: 1})]
    old = run.rows[0]
    run.free(0)
    run.add(0, [50, 51, 52], PENALISED)
    under_way += [run.begin({1: 1, 0: 3}), run.begin({0: 1, 1: 1})]
    for begun in under_way:
        begun.take()
    assert old.output == outputs_alone(PROMPT, PENALISED, 2)
    assert run.rows[0].output == outputs_alone([50, 51, 52], PENALISED, 2)
    assert run.rows[1].output == outputs_alone(PROMPT, GREEDY, 4)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_a_slot_is_taken_again_after_its_step_alone(in_flight: int) -> None:
    """The engine waits for a step only when it needs the step's memory, and keeps the results until they are taken,
    however late."""
    run = EngineRun(device=LateDevice(), max_steps_in_flight=in_flight)
    run.add(0, PROMPT, GREEDY)
    begun: list[Begun] = [run.begin({0: 11})]
    for step in range(1, 7):
        begun.append(run.begin({0: 1}))
        done = [each.pending.is_done for each in begun]
        assert done == [index < step - in_flight for index in range(step + 1)]
    for each in begun:
        each.take()
    assert run.rows[0].output == outputs_alone(PROMPT, GREEDY, 7)


def test_a_step_larger_than_its_room_goes_in_two_copies() -> None:
    layout = StepLayout(max_rows=4, max_tokens=16)
    device = gpu_device()
    memory, staging = device_memory(device, layout), Staging(device, layout, 1)
    arrays = layout.arrays(memory)
    generator = np.random.default_rng(0)
    # Odd sizes; the third is larger than the room, the fourth fits again.
    for size in (7, 1001, 30_001, 5):
        slot = staging.next()
        slot.arrays.rows_R[:] = generator.integers(100, size=4)
        slot.arrays.token_ids_T[:3] = generator.integers(100, size=3)
        values = [generator.integers(100, size=size).astype(np.int32), generator.random((3, size)), np.arange(size)]
        parts = [slot.add(value) for value in values]
        parts.append(slot.add(values[1].astype(np.float32).T))
        slot.send(memory, 3)
        assert torch.equal(arrays.rows_R, torch.from_numpy(slot.arrays.rows_R))
        assert torch.equal(arrays.token_ids_T[:3], torch.from_numpy(slot.arrays.token_ids_T[:3]))
        for part in parts:
            np.testing.assert_array_equal(part.tensor.numpy(), part.array)
            assert part.tensor.data_ptr() % 16 == 0


def test_results_larger_than_ever_are_received() -> None:
    device = gpu_device()
    slot = Staging(device, StepLayout(max_rows=4, max_tokens=16), 1).next()
    for size in (0, 10, 5000, 3):
        assert slot.receive(torch.arange(size, dtype=torch.int32)).tolist() == list(range(size))


@dataclass
class Bodies:
    """A worker.gpu.executor.StepGraphs of 2 and 4 rows, or 4, 8 and 12 tokens with drafts, that runs the engine's own
    bodies, as a replay would, and pieces of 16 tokens. `calls` records what ran."""

    run: EngineRun | None = None
    calls: list[object] = field(default_factory=list)

    def padded(self, num_rows: int) -> int | None:
        return next((size for size in (2, 4) if num_rows <= size), None)

    def padded_with_drafts(self, num_tokens: int) -> int | None:
        return next((size for size in (4, 8, 12) if num_tokens <= size), None)

    def run_forward(self, size: int, *, drafts: bool = False) -> None:
        assert self.run is not None
        self.calls.append(("drafts", size) if drafts else size)
        self.run.engine.forward_body(size, drafts=drafts)

    def run_sample(self, kind: SamplingKind, size: int, *, drafts: bool = False) -> None:
        assert self.run is not None
        self.calls.append((kind.name, size))
        self.run.engine.sample_body(kind, size, drafts=drafts)

    def padded_tokens(self, num_tokens: int) -> int | None:
        return 16 if num_tokens <= 16 else None

    def run_pieces(self, batch: GpuBatch) -> Residual:
        assert self.run is not None
        assert batch.num_tokens == 16
        self.calls.append("pieces")
        return self.run.model.forward(batch, self.run.kv_cache)

    def drop(self) -> None:
        raise AssertionError("one rank drops no graphs")


def test_drafts_in_graphs_are_verified_as_without() -> None:
    """Each row has its own number of drafts; steps that fit into no graph, or have more drafts a row than graphs allow,
    run in pieces."""
    graphs = Bodies()
    run = EngineRun(device=LateDevice(), graphs=graphs, most_drafts=3)
    graphs.run = run
    run.engine.forward_body(8, drafts=True)
    run.engine.sample_body(SamplingKind.DRAWS, 8, drafts=True)
    run.model.shapes.clear()
    params = {0: GREEDY, 1: PENALISED, 2: DRAWN}
    alone = {row: outputs_alone(PROMPT[:11], each, 16) for row, each in params.items()}
    for row, each in params.items():
        run.add(row, PROMPT[:11], each)
    run.step(dict.fromkeys(params, 11))

    def step(num_drafts: dict[int, int], wrong: int = -1) -> list[int]:
        drafts = {}
        for row, count in num_drafts.items():
            known = len(run.rows[row].output)
            drafts[row] = alone[row][known : known + count]
            if row == wrong:
                drafts[row][-1] = (drafts[row][-1] + 1) % 90
        return run.step(dict.fromkeys(num_drafts, 1), drafts=drafts).counts_N.tolist()

    graphs.calls.clear()
    assert step({2: 3, 0: 1, 1: 2}) == [4, 2, 3]
    assert step({0: 1, 2: 2}, wrong=2) == [2, 2]
    assert step({1: 1, 0: 0}, wrong=1) == [1, 1]
    assert step({0: 4}) == [5]
    assert step({0: 3, 1: 3, 2: 3}, wrong=0) == [3, 4, 4]
    run.step(dict.fromkeys(params, 1))
    assert graphs.calls == [
        *(("drafts", 12), ("DRAWS", 12)),
        *(("drafts", 8), ("DRAWS", 8)),
        *(("drafts", 4), ("GREEDY", 4)),
        "pieces",
        *(("drafts", 12), ("DRAWS", 12)),
        *(4, ("DRAWS", 4)),
    ]
    assert run.model.shapes[1:3] == [(12, 6), (8, 6)]
    for row, expected in alone.items():
        assert run.rows[row].output == expected[: len(run.rows[row].output)], row


def test_padding_of_graphs_changes_nothing() -> None:
    """The number of rows changes between graph sizes; prompts, and more decodes than the largest size, run in pieces or
    without graphs."""
    graphs = Bodies()
    run = EngineRun(device=LateDevice(), graphs=graphs)
    graphs.run = run
    # As in a capture, everything is padding.
    run.engine.forward_body(4)
    for kind in (SamplingKind.GREEDY, SamplingKind.DRAWS):
        run.engine.sample_body(kind, 4)
    assert run.engine.pieces_batch(16).token_ids_T.tolist() == [-1] * 16
    run.model.shapes.clear()

    params = {0: GREEDY, 1: PENALISED, 2: DRAWN, 5: GREEDY, 4: PENALISED}
    for row in (0, 1, 2):
        run.add(row, PROMPT[: 5 + row], params[row])
    begun = [run.begin({0: 5, 1: 6, 2: 7})]
    begun += [run.begin({2: 1, 1: 1, 0: 1}), run.begin({1: 1, 0: 1}), run.begin({0: 1})]
    for row in (5, 4):
        run.add(row, PROMPT[: 5 + row], params[row])
    begun += [run.begin({5: 10, 4: 9, 2: 1}), run.begin(dict.fromkeys(params, 1)), run.begin({4: 1, 2: 1, 1: 1})]
    for each in begun:
        each.take()
    assert graphs.calls == [
        *(4, ("DRAWS", 4), 2, ("GREEDY", 2), 2, ("GREEDY", 2)),
        *("pieces", 4, ("DRAWS", 4)),
    ]
    # Tokens and rows.
    assert run.model.shapes == [(18, 3), (4, 4), (2, 2), (2, 2), (20, 3), (16, 5), (4, 4)]
    for row, each in params.items():
        output = run.rows[row].output
        assert output == outputs_alone(PROMPT[: 5 + row], each, len(output)), row


# On a GPU's tensors, each of these waits for the device.
OPS_THAT_READ = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"}
METHODS_THAT_READ = ("tolist", "item", "cpu", "__bool__", "__int__", "__index__", "__float__")


class NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in OPS_THAT_READ, f"aten.{name} waits for the device"
        if name in ("index", "index_put_"):
            assert all(index is None or index.dtype is not torch.bool for index in args[1])
        return func(*args, **(kwargs or {}))


class ReadingModel(FakeGpuModel):
    """A model that may read from the device; the engine may not."""

    def __init__(self) -> None:
        super().__init__()
        self.is_computing = False

    def forward(self, batch: GpuBatch, kv_cache: KVCache, pieces: PiecewiseGraph | None = None) -> Residual:
        with self._reading():
            return super().forward(batch, kv_cache, pieces)

    def logits(self, hidden_SE: Residual, out: torch.Tensor | None = None) -> torch.Tensor:
        with self._reading():
            return super().logits(hidden_SE, out)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        self.is_computing = True
        with _disable_current_modes():
            yield
        self.is_computing = False


def test_the_host_reads_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of each kind."""
    model = ReadingModel()
    run = EngineRun(model=model, device=LateDevice(), max_steps_in_flight=6)

    def forbidden(name: str):
        original = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *args: object):
            assert model.is_computing, f"Tensor.{name} waits for the device"
            return original(tensor, *args)

        return method

    for name in METHODS_THAT_READ:
        monkeypatch.setattr(torch.Tensor, name, forbidden(name))
    run.add(0, PROMPT, SamplingParams(temperature=1.0, seed=1, top_k=5, logprobs=2, min_tokens=3, logit_bias={3: 1.0}))
    run.add(1, PROMPT, PENALISED, output=[7])
    scores = PromptScores(tokens_P=np.arange(3, dtype=np.int32), targets_P=np.arange(3, dtype=np.int32), num_top=2)
    with NoHostReads():
        begun = [
            run.begin({0: 11, 1: 12}, prompt_scores=scores),
            run.begin({0: 1, 1: 1}),
            run.begin({1: 1, 0: 1}, drafts={1: [5, 6]}),
        ]
    monkeypatch.undo()
    assert not any(each.pending.is_done for each in begun)
    for each in begun:
        each.take()
    assert len(run.rows[0].output) == 3
