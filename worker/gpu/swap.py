"""Host memory for the KV of sequences that were preempted by swap, beside a KV cache on a GPU. Copies are ordered on
the device; the host never waits for them.

Shape suffixes: C blocks.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from kernels.kv_cache.swap.torch_gpu import BlockSwap, copy_runs, merge_runs, pinned_layers
from worker.device.device import Device
from worker.layers.kv_cache import KVCache
from worker.step.rows import PlannedSwaps


# Torch's events of CUDA are the other one.
class CopyEvent(Protocol):
    """The end of a swap's copies."""

    def wait(self) -> None:
        """Makes later work on the device wait for the copies."""
        ...

    def query(self) -> bool:
        """Returns True if the copies are done."""
        ...


class Swap(Protocol):
    """The interface of kernels.kv_cache.swap.torch_gpu.BlockSwap: copies in order, after all earlier device work."""

    def swap_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> CopyEvent: ...
    def swap_in(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> CopyEvent: ...


class GpuSwapSpace:
    """Host blocks for swapped KV, numbered from 0; each spans all layers of the KV cache. Free blocks hold garbage."""

    def __init__(self, kv_cache: KVCache, device: Device, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # The last KV block that can be allocated.
        self.last_block = kv_cache.num_blocks - 1
        self._swap = _swap(kv_cache.layers, device, num_blocks) if num_blocks else None
        # Blocks whose copies to the host may be in flight.
        self._leaving: list[tuple[np.ndarray, CopyEvent]] = []

    def apply(self, swaps: PlannedSwaps | None, taken_blocks_C: np.ndarray) -> None:
        """Copies blocks out, then others in. Later steps wait for the blocks that come in, and for blocks that go out
        only if a row takes them.

        taken_blocks_C: int64, blocks that rows get by the same plan.
        """
        if swaps is not None:
            assert self._swap is not None, "planned_swaps refuses every swap if num_host_blocks is 0"
            if len(swaps.out_blocks):
                event = self._swap.swap_out(swaps.out_blocks.tolist(), swaps.out_host_blocks.tolist())
                self._leaving.append((swaps.out_blocks, event))
            if len(swaps.in_blocks):
                self._swap.swap_in(swaps.in_host_blocks.tolist(), swaps.in_blocks.tolist()).wait()
        if self._leaving:
            self._leaving = [(blocks_C, event) for blocks_C, event in self._leaving if not event.query()]
            for blocks_C, event in self._leaving:
                if np.isin(blocks_C, taken_blocks_C).any():
                    event.wait()

    def forget(self) -> None:
        """Forgets all copies; call it when none is in flight."""
        self._leaving.clear()


def _swap(layers: list[torch.Tensor], device: Device, num_blocks: int) -> Swap:
    if device.torch_device.type == "cuda":
        return BlockSwap(layers, pinned_layers(layers, num_blocks))
    return _SwapAtOnce(layers, [torch.empty((num_blocks, *layer.shape[1:]), dtype=layer.dtype) for layer in layers])


class _SwapAtOnce:
    """A Swap that copies immediately, where a CPU stands in for a GPU."""

    def __init__(self, device_layers: list[torch.Tensor], host_layers: list[torch.Tensor]) -> None:
        self._device_layers, self._host_layers = device_layers, host_layers

    def swap_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> CopyEvent:
        copy_runs(self._device_layers, self._host_layers, merge_runs(device_blocks, host_blocks))
        return _Copied()

    def swap_in(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> CopyEvent:
        copy_runs(self._host_layers, self._device_layers, merge_runs(host_blocks, device_blocks))
        return _Copied()


class _Copied:
    def wait(self) -> None:
        pass

    def query(self) -> bool:
        return True
