"""Graphs of steps that only decode, of an engine made of a few torch calls. The device's graphs are recordings, as a
GPU's are: they contain nothing that a body reads from the host or from freed memory."""

import gc
from dataclasses import dataclass, field

import pytest
import torch

from kernels.linear.residual import Residual
from tests.fakes.gpu.recording_device import GoneError, RecordingDevice
from worker.device.device import Device, DeviceMemory, InterpretedDevice
from worker.gpu.graphs import CapturedGraphs, GraphSizes, graph_memory_estimate
from worker.sampling.filters import SamplingKind
from worker.step.batch import GpuBatch

ROWS, VOCABULARY = 8, 5
SIZES = GraphSizes(decodes=(1, 2, 4, 8))


@dataclass
class Engine:
    """An engine in which a row's next token is a function of its last one, and its cache the sum of its tokens."""

    rows_S: torch.Tensor = field(default_factory=lambda: torch.full((ROWS,), -1))
    # The extra place takes what padding writes.
    last_token_R: torch.Tensor = field(default_factory=lambda: torch.arange(ROWS + 1) % VOCABULARY)
    cache_R: torch.Tensor = field(default_factory=lambda: torch.zeros(ROWS + 1))
    logits_SV: torch.Tensor = field(default_factory=lambda: torch.full((ROWS, VOCABULARY), torch.nan))
    calls: list[tuple[str, int]] = field(default_factory=list)

    def _places(self, size: int) -> torch.Tensor:
        rows_S = self.rows_S[:size]
        return torch.where(rows_S < 0, ROWS, rows_S)

    def forward_body(self, size: int, *, drafts: bool = False) -> None:
        self.calls.append(("forward", size))
        places_S = self._places(size)
        tokens_S = self.last_token_R[places_S]
        self.cache_R.index_add_(0, places_S, tokens_S.float())
        self.logits_SV[:size] = torch.nn.functional.one_hot((3 * tokens_S + 1) % VOCABULARY, VOCABULARY).float()

    def sample_body(self, kind: SamplingKind, size: int, *, drafts: bool = False) -> None:
        self.calls.append((kind.name, size))
        self.last_token_R[self._places(size)] = self.logits_SV[:size].argmax(1) + kind.value

    def pieces_batch(self, num_tokens: int) -> GpuBatch:
        raise AssertionError("there are no pieces")

    def state(self) -> list[list[float]]:
        return [self.last_token_R[:ROWS].tolist(), self.cache_R[:ROWS].tolist()]

    def next(self, rows: list[int], size: int) -> None:
        """Does the host's part of a step."""
        self.rows_S[: len(rows)] = torch.tensor(rows)
        self.rows_S[len(rows) : size] = -1


class NoModel:
    """The model of an engine without piecewise graphs."""

    def reserve(self, max_tokens: int, max_rows: int, max_context: int, most_queries: int = 1) -> None: ...
    def forward(self, batch: object, kv_cache: object, pieces: object = None) -> Residual:
        raise AssertionError("there are no pieces")

    def logits(self, hidden: Residual, out: torch.Tensor | None = None) -> torch.Tensor:
        raise AssertionError("there are no pieces")


def _graphs(engine: Engine, device: Device, sizes: GraphSizes = SIZES) -> CapturedGraphs:
    return CapturedGraphs(engine, NoModel(), None, device, sizes)  # type: ignore[arg-type]


def _captured(engine: Engine, device: Device | None = None) -> CapturedGraphs:
    graphs = _graphs(engine, device or RecordingDevice())
    graphs.capture()
    return graphs


def test_a_graph_does_what_its_body_does_for_rows_that_came_after_the_capture() -> None:
    engine, eager = Engine(), Engine()
    graphs = _captured(engine)
    for rows, kind in (([3, 1, 6], SamplingKind.GREEDY), ([6], SamplingKind.FILTERS), ([0, 7, 1], SamplingKind.DRAWS)):
        size = graphs.padded(len(rows))
        assert size is not None
        engine.next(rows, size)
        graphs.run_forward(size)
        graphs.run_sample(kind, size)
        eager.next(rows, len(rows))
        eager.forward_body(len(rows))
        eager.sample_body(kind, len(rows))
        assert engine.state() == eager.state()
    assert graphs.num_full == 3


def test_capturing_changes_no_row() -> None:
    engine = Engine()
    before = engine.state()
    _captured(engine)
    assert engine.state() == before


def test_replays_call_no_python_of_the_engine() -> None:
    engine = Engine()
    graphs = _captured(engine)
    engine.calls.clear()
    graphs.run_forward(4)
    graphs.run_sample(SamplingKind.DRAWS, 4)
    assert engine.calls == []


def test_captures_are_from_large_to_small_each_after_it_has_run_once_in_one_pool() -> None:
    engine, device = Engine(), RecordingDevice()
    _captured(engine, device)
    kinds = [kind.name for kind in SamplingKind]
    assert engine.calls == [(name, size) for size in (8, 4, 2, 1) for name in 2 * ["forward", *kinds]]
    assert len(device.pools) == 4 * 4
    assert len(set(map(id, device.pools))) == 1


def test_a_step_runs_in_the_next_size() -> None:
    graphs = _graphs(Engine(), InterpretedDevice())
    assert [graphs.padded(rows) for rows in (1, 3, 8, 9)] == [1, 4, 8, None]
    assert graphs.padded_tokens(1) is None


class Metered(InterpretedDevice):
    """A device whose free memory shrinks with each capture by the next of `costs`, in bytes."""

    def __init__(self, costs: list[int]) -> None:
        super().__init__()
        self._costs, self._free = costs, 1 << 30

    def capture(self, body, pool):  # type: ignore[no-untyped-def]
        self._free -= self._costs.pop(0)
        return super().capture(body, pool)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(total=1 << 30, free=self._free)


def test_what_graphs_take_is_measured_and_estimated_from_the_two_largest() -> None:
    """Each size has a graph of the forward pass and one for each of three kinds of sampling."""
    largest, second = [1000, 100, 10, 1], [50, 5, 0, 0]
    rest = [40, 4, 0, 0, 30, 3, 0, 0]
    graphs = _graphs(Engine(), Metered([*largest, *second, *rest]))
    graphs.capture()
    assert graphs.num_bytes == 1111 + 55 + 44 + 33
    # Only the two largest sizes are captured: a third would find no cost.
    device = Metered([*largest, *second])
    assert graph_memory_estimate(Engine(), NoModel(), None, device, SIZES) == 1111 + 3 * 55  # type: ignore[arg-type]
    one = GraphSizes(decodes=(8,))
    assert graph_memory_estimate(Engine(), NoModel(), None, Metered(largest), one) == 1111  # type: ignore[arg-type]
    assert graph_memory_estimate(Engine(), NoModel(), None, Metered([]), GraphSizes()) == 0  # type: ignore[arg-type]


# --- The recordings themselves: bodies that would be wrong on a GPU fail.


def test_a_body_that_reads_a_number_of_the_device_is_found() -> None:
    numbers = torch.ones(3)
    with pytest.raises(AssertionError, match="_local_scalar_dense"):
        RecordingDevice().capture(lambda: numbers.add_(numbers[0].item()), None)
    with pytest.raises(AssertionError, match="boolean index"):
        RecordingDevice().capture(lambda: numbers[numbers > 0], None)


def test_memory_from_before_a_capture_that_nobody_keeps_is_found() -> None:
    numbers = torch.ones(3)
    temporary = [torch.full((3,), 2.0)]
    graph = RecordingDevice().capture(lambda: numbers.mul_(temporary[0]), None)
    graph.replay()
    assert numbers.tolist() == [2, 2, 2]
    temporary.clear()
    gc.collect()
    with pytest.raises(GoneError, match="mul_"):
        graph.replay()


def test_what_a_capture_allocates_stays_and_what_it_computes_does_not() -> None:
    numbers, doubled = torch.ones(3), []
    graph = RecordingDevice().capture(lambda: doubled.append(numbers + numbers), None)
    assert doubled[0].isnan().all()
    numbers.fill_(4)
    graph.replay()
    assert doubled[0].tolist() == [8, 8, 8]
