"""Block swap: merging into runs, copies, and the order of copies and computation. The copies run on the CPU; without a
GPU, the use of streams and events is recorded instead."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.kv_cache.swap.torch_gpu import BlockSwap, Run, merge_runs, pinned_layers

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("sources", "targets", "runs"),
    [
        ([], [], []),
        ([4], [9], [Run(4, 9, 1)]),
        ([4, 5, 6], [9, 10, 11], [Run(4, 9, 3)]),
        ([6, 4, 5], [11, 9, 10], [Run(4, 9, 3)]),  # in no order
        ([4, 5, 6], [9, 10, 12], [Run(4, 9, 2), Run(6, 12, 1)]),  # neighbours of one side alone
        ([4, 5], [9, 8], [Run(4, 9, 1), Run(5, 8, 1)]),  # backwards
        ([4, 4], [7, 8], [Run(4, 7, 1), Run(4, 8, 1)]),  # one block to two places
    ],
)
def test_neighbours_on_both_sides_are_one_run(sources: list[int], targets: list[int], runs: list[Run]) -> None:
    assert merge_runs(sources, targets) == runs


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40, unique_by=lambda pair: pair[1]))
def test_runs_hold_each_pair_once_and_cannot_be_merged_further(pairs: list[tuple[int, int]]) -> None:
    runs = merge_runs([source for source, _ in pairs], [target for _, target in pairs])
    unrolled = [(run.source + i, run.target + i) for run in runs for i in range(run.num_blocks)]
    assert sorted(unrolled) == sorted(pairs)
    if len({source for source, _ in pairs}) == len(pairs):
        starts = {(run.source, run.target) for run in runs}
        assert not any((run.source + run.num_blocks, run.target + run.num_blocks) in starts for run in runs)


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [([1, 2], [3], "2 source blocks for 1"), ([1, 2], [3, 3], "target block 3"), ([-1], [0], "block -1")],
)
def test_blocks_that_make_no_sense_are_refused(sources: list[int], targets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge_runs(sources, targets)


class RecordedStream:
    """A stand-in for torch.cuda.Stream that records calls."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self.name = log, name

    def wait_stream(self, other: "RecordedStream") -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def record_event(self, event: str) -> None:
        self._log.append(f"{event} on {self.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log of calls to torch.cuda's streams, which are replaced by stand-ins."""
    log: list[str] = []

    @contextlib.contextmanager
    def on_stream(stream: RecordedStream) -> Iterator[None]:
        log.append(f"{stream.name} begins")
        yield
        log.append(f"{stream.name} ends")

    monkeypatch.setattr(torch.cuda, "Event", lambda: "event")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: RecordedStream(log, "copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: RecordedStream(log, "computation"))
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    return log


def _layers(num_blocks: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_blocks, 2, 3, 4, 8, generator=generator) for _ in range(2)]


def test_swaps_wait_for_the_computation_and_end_with_an_event(log: list[str]) -> None:
    """A copy that does not wait reads keys that are still being written, or overwrites keys that are still being
    read."""
    swap = BlockSwap(_layers(6, 0), _layers(4, 1))
    ordered = ["copies waits for computation", "copies begins", "copies ends", "event on copies"]
    assert swap.swap_out([1], [0]) == "event"
    assert log == ordered
    assert swap.swap_in([0], [2]) == "event"
    assert log == ordered * 2


@pytest.mark.usefixtures("log")
def test_blocks_come_back_as_they_were_and_others_stay() -> None:
    device, host = _layers(6, 0), _layers(4, 1)
    before, host_before = [layer.clone() for layer in device], [layer.clone() for layer in host]
    swap = BlockSwap(device, host)
    swap.swap_out([2, 3, 5], [1, 2, 0])
    for layer in device:
        layer[[2, 3, 5]] = float("nan")
    swap.swap_in([0, 1, 2], [4, 2, 3])
    for layer, old, host_layer, host_old in zip(device, before, host, host_before, strict=True):
        assert torch.equal(layer[[0, 1, 2, 3, 4]], old[[0, 1, 2, 3, 5]])
        assert layer[5].isnan().all()
        assert torch.equal(host_layer[3], host_old[3])


@pytest.mark.usefixtures("log")
def test_pools_that_do_not_fit_are_refused() -> None:
    device, host = _layers(6, 0), _layers(4, 1)
    with pytest.raises(ValueError, match="1 host layers for 2"):
        BlockSwap(device, host[:1])
    with pytest.raises(ValueError, match="layer 1: blocks are"):
        BlockSwap(device, [host[0], host[1].half()])
    with pytest.raises(ValueError, match="layer 0: both pools have to be contiguous"):
        BlockSwap([layer[::2] for layer in device], host)


@needs_gpu
def test_on_a_gpu_steps_and_swaps_are_ordered_by_events() -> None:
    device = [torch.zeros(64, 1 << 20, device="cuda") for _ in range(4)]
    swap = BlockSwap(device, host := pinned_layers(device, 64))
    for step in range(1, 4):
        for layer in device:
            layer.fill_(step)
        swap.swap_out(range(64), range(64)).wait()
        for layer in device:
            layer.fill_(-1)
        swap.swap_in(range(64), range(64)).wait()
        assert all((layer == step).all() for layer in device)
    assert all(layer.is_pinned() for layer in host)
