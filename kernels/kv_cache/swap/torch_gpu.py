"""Swaps blocks between a GPU's KV cache and pinned host memory on a separate stream; adjacent blocks share a copy."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Run(NamedTuple):
    """Blocks source, source + 1, ... of one pool, copied to target, target + 1, ... of the other."""

    source: int
    target: int
    num_blocks: int


def merge_runs(source_blocks: Sequence[int], target_blocks: Sequence[int]) -> list[Run]:
    """Returns the fewest runs that copy source_blocks[i] to target_blocks[i] for each i, by ascending source.

    Starting a DMA copy costs the host about 5 us, whatever its size, and a swap needs one per run and layer. Blocks of
    a sequence that was admitted at once are mostly adjacent. The pools are different memory, so the order of the pairs
    does not matter. Raises ValueError if the lists differ in length, for a negative block, and for a target that occurs
    twice.
    """
    if len(source_blocks) != len(target_blocks):
        raise ValueError(f"{len(source_blocks)} source blocks for {len(target_blocks)} target blocks: give as many")
    if len(set(target_blocks)) != len(target_blocks):
        twice = next(block for block in target_blocks if list(target_blocks).count(block) > 1)
        raise ValueError(f"target block {twice} occurs more than once; its contents would be arbitrary")
    runs: list[Run] = []
    for source, target in sorted(zip(source_blocks, target_blocks, strict=True)):
        if min(source, target) < 0:
            raise ValueError(f"block {min(source, target)}: blocks are numbered from 0")
        last = runs[-1] if runs else None
        if last is not None and (source, target) == (last.source + last.num_blocks, last.target + last.num_blocks):
            runs[-1] = last._replace(num_blocks=last.num_blocks + 1)
        else:
            runs.append(Run(source, target, 1))
    return runs


def copy_runs(
    source_layers: Sequence[torch.Tensor], target_layers: Sequence[torch.Tensor], runs: Sequence[Run]
) -> None:
    """Copies the runs in each layer; asynchronously if the host memory is pinned.

    Layers: [blocks, ...], contiguous, of one dtype and of one shape except for dim 0.
    """
    for source_N, target_M in zip(source_layers, target_layers, strict=True):
        for run in runs:
            target_M[run.target : run.target + run.num_blocks].copy_(
                source_N[run.source : run.source + run.num_blocks], non_blocking=True
            )


def pinned_layers(device_layers: Sequence[torch.Tensor], num_blocks: int) -> list[torch.Tensor]:
    """Pinned host memory for num_blocks blocks of each layer, uninitialized.

    PyTorch's allocator of pinned memory rounds each layer up to a power of two bytes.
    """
    return [torch.empty((num_blocks, *layer.shape[1:]), dtype=layer.dtype, pin_memory=True) for layer in device_layers]


class BlockSwap:
    """Swaps blocks of a KV cache, in all layers, out to host memory and back in.

    Swaps execute in the order of the calls, so blocks may be swapped in where others have just been swapped out.
    """

    def __init__(self, device_layers: Sequence[torch.Tensor], host_layers: Sequence[torch.Tensor]) -> None:
        """device_layers: [N, ...] on one GPU. host_layers: as many, [M, ...], pinned (see `pinned_layers`).

        Every layer is contiguous, and its dim 0 is blocks. Raises ValueError if a pair of layers differs in the shape
        of a block or in dtype, or a layer is not contiguous.
        """
        if len(device_layers) != len(host_layers):
            raise ValueError(f"{len(host_layers)} host layers for {len(device_layers)} device layers: give as many")
        for i, (device, host) in enumerate(zip(device_layers, host_layers, strict=True)):
            if (device.shape[1:], device.dtype) != (host.shape[1:], host.dtype):
                raise ValueError(
                    f"layer {i}: blocks are {tuple(device.shape[1:])} {device.dtype} on the device, "
                    f"{tuple(host.shape[1:])} {host.dtype} on the host; they must be the same"
                )
            if not (device.is_contiguous() and host.is_contiguous()):
                raise ValueError(f"layer {i}: both pools have to be contiguous, so that runs of blocks are")
        self._device_layers, self._host_layers = device_layers, host_layers
        self._device = device_layers[0].device
        self._stream = torch.cuda.Stream(self._device)

    def swap_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> torch.cuda.Event:
        """Copies device_blocks[i] to host_blocks[i], after all work queued on the current stream so far.

        Work that overwrites the device blocks must wait for the returned event: `event.wait()` makes the current stream
        wait. The host does not wait. Raises ValueError as `merge_runs` does, before anything is copied.
        """
        return self._copy(self._device_layers, self._host_layers, device_blocks, host_blocks)

    def swap_in(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> torch.cuda.Event:
        """Copies host_blocks[i] to device_blocks[i], after all work queued on the current stream so far: it may still
        read the blocks' old contents.

        Work that reads the device blocks must wait for the returned event. The host does not wait. Errors as in
        `swap_out`.
        """
        return self._copy(self._host_layers, self._device_layers, host_blocks, device_blocks)

    def _copy(
        self,
        source_layers: Sequence[torch.Tensor],
        target_layers: Sequence[torch.Tensor],
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
    ) -> torch.cuda.Event:
        runs = merge_runs(source_blocks, target_blocks)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy_runs(source_layers, target_layers, runs)
        event = torch.cuda.Event()
        self._stream.record_event(event)
        return event
