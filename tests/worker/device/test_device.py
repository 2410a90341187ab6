"""CudaDevice over a fake torch.cuda: whose error a failed capture raises, and whose stream a thread works on."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from worker.device.device import CudaDevice


@dataclass
class FakeGraph:
    """A CUDAGraph that fails like CUDA's if it is ended twice or without a beginning."""

    fails_to_end: bool = False
    is_capturing: bool = False
    num_replays: int = 0

    def capture_begin(self, **options: object) -> None:
        self.is_capturing = True

    def capture_end(self) -> None:
        if not self.is_capturing or self.fails_to_end:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.is_capturing = False

    def replay(self) -> None:
        self.num_replays += 1


@dataclass
class FakeCuda:
    graphs: list[FakeGraph] = field(default_factory=list)
    fails_to_end: bool = False
    streams: threading.local = field(default_factory=threading.local)

    def graph(self) -> FakeGraph:
        self.graphs.append(FakeGraph(self.fails_to_end))
        return self.graphs[-1]

    def current(self) -> object:
        return getattr(self.streams, "current", "the default")

    def set_stream(self, stream: object) -> None:
        self.streams.current = stream

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        before = self.current()
        self.set_stream(stream)
        yield
        self.set_stream(before)


_REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake, matmul = FakeCuda(), torch.backends.cuda.matmul
    for name, value in {
        "CUDAGraph": fake.graph,
        "set_stream": fake.set_stream,
        "stream": fake.stream,
        "Stream": lambda device: f"a stream of {device}",
        "set_device": lambda device: None,
        "get_device_name": lambda device: "a GPU",
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    before = [getattr(matmul, name) for name in _REDUCTIONS]
    yield fake
    for name, value in zip(_REDUCTIONS, before, strict=True):
        setattr(matmul, name, value)


def fail() -> torch.Tensor:
    raise ValueError("the cause")


@pytest.mark.parametrize("fails_to_end", [False, True])
def test_a_failed_capture_raises_its_first_error(cuda: FakeCuda, fails_to_end: bool):
    cuda.fails_to_end = fails_to_end
    device = CudaDevice(1)
    with pytest.raises(ValueError, match="the cause"):
        device.capture(fail, None)
    assert len(cuda.graphs) == 1
    with pytest.raises(ValueError, match="the cause"):
        device.capture_pieces(fail, None)
    if not fails_to_end:
        assert not any(graph.is_capturing for graph in cuda.graphs), "a capture still runs, and poisons all later work"


def test_so_does_a_call_between_pieces_which_runs_in_no_capture(cuda: FakeCuda):
    device = CudaDevice(1)
    with pytest.raises(ValueError, match="the cause"):
        device.capture_pieces(lambda: device.between_graphs(fail), None)
    assert [graph.is_capturing for graph in cuda.graphs] == [False]
    # The next capture is a new one.
    device.capture_pieces(lambda: device.between_graphs(lambda: torch.zeros(1)), None).replay()
    assert [graph.num_replays for graph in cuda.graphs] == [0, 1, 1]


def test_every_thread_that_enters_works_on_the_devices_stream(cuda: FakeCuda):
    device = CudaDevice(1)
    seen: list[object] = []

    def work() -> None:
        seen.append(cuda.current())
        with device.current():
            seen.append(cuda.current())
        seen.append(cuda.current())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["the default", "a stream of cuda:1", "the default"]


def test_parts_of_a_product_are_added_in_float32(cuda: FakeCuda):
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
    CudaDevice()
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction
