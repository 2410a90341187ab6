"""Block swap on a GPU: copies by the DMA engines on a stream of their own, ordered by events.

Not a kernel: one that reads host memory takes SMs from the step that runs beside it, where the DMA engines take none.
"""

from collections.abc import Sequence

import torch

from kernels.block_swap.runs import copy_runs, merge_runs


def pinned_layers(device_layers: Sequence[torch.Tensor], num_blocks: int) -> list[torch.Tensor]:
    """Pinned host memory for num_blocks blocks of each layer, uninitialized.

    PyTorch's allocator of pinned memory rounds each layer up to a power of two bytes.
    """
    return [torch.empty((num_blocks, *layer.shape[1:]), dtype=layer.dtype, pin_memory=True) for layer in device_layers]


class BlockSwap:
    """Swaps blocks of a KV cache, all layers, out to host memory and in again.

    Swaps are carried out in the order in which they are called, so blocks may be swapped in where others have just been
    swapped out.
    """

    def __init__(self, device_layers: Sequence[torch.Tensor], host_layers: Sequence[torch.Tensor]) -> None:
        """device_layers: [N, ...] on one GPU. host_layers: [M, ...], pinned (see `pinned_layers`), as many.

        Every layer's dim 0 is blocks; a block is contiguous and beside its neighbours. Raises ValueError if a pair of
        layers differs in the shape of a block or in dtype, or a layer is not contiguous.
        """
        if len(device_layers) != len(host_layers):
            raise ValueError(f"{len(host_layers)} host layers for {len(device_layers)} device layers: one is due each")
        for i, (device, host) in enumerate(zip(device_layers, host_layers, strict=True)):
            if (device.shape[1:], device.dtype) != (host.shape[1:], host.dtype):
                raise ValueError(
                    f"layer {i}: blocks are {tuple(device.shape[1:])} {device.dtype} on the device, "
                    f"{tuple(host.shape[1:])} {host.dtype} on the host; they have to be the same"
                )
            if not (device.is_contiguous() and host.is_contiguous()):
                raise ValueError(f"layer {i}: both pools have to be contiguous, for runs of blocks to be")
        self._device_layers, self._host_layers = device_layers, host_layers
        self._device = device_layers[0].device
        self._stream = torch.cuda.Stream(self._device)

    def swap_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> torch.cuda.Event:
        """Copies device_blocks[i] to host_blocks[i], after what the current stream holds so far.

        Later work may overwrite the device blocks once the event has passed: `event.wait()` makes the current stream
        wait for it. The host does not wait. Raises ValueError as `merge_runs` does, before anything is copied.
        """
        return self._copy(self._device_layers, self._host_layers, device_blocks, host_blocks)

    def swap_in(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> torch.cuda.Event:
        """Copies host_blocks[i] to device_blocks[i], after what the current stream holds so far, which may still read
        what those blocks held before.

        Work that reads the device blocks waits for the event. The host does not wait. Errors as of `swap_out`.
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
