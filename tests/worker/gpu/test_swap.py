"""Swap beside a GPU's steps: the copies, and the later work that waits for them."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.fakes.gpu.gpu_model import fake_kv_cache
from tests.support.gpu.gpu import gpu_device
from worker.gpu import swap
from worker.gpu.swap import GpuSwapSpace
from worker.step.rows import PlannedSwaps

NO_BLOCKS = np.empty(0, np.int64)


def swaps(out: Sequence[tuple[int, int]] = (), back: Sequence[tuple[int, int]] = ()) -> PlannedSwaps:
    """out: (KV block, host block); back: (host block, KV block)."""
    out_blocks, out_host_blocks = np.array(out, np.int64).reshape(-1, 2).T
    in_host_blocks, in_blocks = np.array(back, np.int64).reshape(-1, 2).T
    return PlannedSwaps(
        out_blocks=out_blocks, out_host_blocks=out_host_blocks, in_host_blocks=in_host_blocks, in_blocks=in_blocks
    )


def test_out_comes_before_in_whatever_the_order_of_blocks() -> None:
    kv_cache = fake_kv_cache()
    [layer] = kv_cache.layers
    for block in (1, 2, 3):
        layer[block] = block
    space = GpuSwapSpace(kv_cache, gpu_device(), 3)
    space.apply(swaps(out=[(1, 2), (2, 0), (3, 1)], back=[(2, 3), (0, 1), (1, 2)]), NO_BLOCKS)
    assert [set(layer[block].unique().tolist()) for block in (1, 2, 3)] == [{2}, {3}, {1}]


class HeldCopies:
    """Copies of a swap that are in flight until `done`."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls, self.done = name, calls, False

    def wait(self) -> None:
        self._calls.append(f"wait for {self._name}")

    def query(self) -> bool:
        return self.done


class RecordingSwap:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.copies: list[HeldCopies] = []

    def swap_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> HeldCopies:
        return self._copy(f"out {device_blocks} to {host_blocks}")

    def swap_in(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> HeldCopies:
        return self._copy(f"in {host_blocks} to {device_blocks}")

    def _copy(self, name: str) -> HeldCopies:
        self.calls.append(name)
        self.copies.append(HeldCopies(name, self.calls))
        return self.copies[-1]

    def take_calls(self) -> list[str]:
        calls = self.calls[:]
        self.calls.clear()
        return calls


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordingSwap:
    recording = RecordingSwap()
    monkeypatch.setattr(swap, "_swap", lambda layers, device, num_blocks: recording)
    return recording


def test_steps_wait_for_what_comes_in_and_for_what_they_overwrite(recorded: RecordingSwap) -> None:
    space = GpuSwapSpace(fake_kv_cache(), gpu_device(), 8)
    space.apply(swaps(out=[(1, 0), (2, 1)]), np.array([7, 8]))
    assert recorded.take_calls() == ["out [1, 2] to [0, 1]"]
    # Blocks that are not being copied, then one that is being swapped out.
    space.apply(None, np.array([3]))
    assert recorded.take_calls() == []
    space.apply(None, np.array([4, 2]))
    assert recorded.take_calls() == ["wait for out [1, 2] to [0, 1]"]
    space.apply(swaps(out=[(5, 2)], back=[(0, 6)]), np.array([6, 5]))
    assert recorded.take_calls() == [
        "out [5] to [2]",
        "in [0] to [6]",
        "wait for in [0] to [6]",
        "wait for out [5] to [2]",
    ]


def test_copies_that_are_done_keep_nobody_waiting(recorded: RecordingSwap) -> None:
    space = GpuSwapSpace(fake_kv_cache(), gpu_device(), 8)
    space.apply(swaps(out=[(1, 0)]), NO_BLOCKS)
    space.apply(swaps(out=[(2, 1)]), NO_BLOCKS)
    recorded.copies[0].done = True
    space.apply(None, np.array([1]))
    assert "wait for out [1] to [0]" not in recorded.take_calls()
    # After a reset, which waits for the device, no copy is in flight.
    space.forget()
    space.apply(None, np.array([2]))
    assert recorded.take_calls() == []


def test_without_host_blocks_no_memory_is_taken(recorded: RecordingSwap) -> None:
    space = GpuSwapSpace(fake_kv_cache(num_blocks=9), gpu_device(), 0)
    space.apply(None, torch.arange(3).numpy())
    assert (space.num_blocks, space.last_block, space._swap) == (0, 8, None)
