"""Pinned host memory through which inputs of steps go to the device, and results come back.

One copy carries all inputs of a step. `StepArrays` come first, at the same addresses in each step, where graphs read
them. `Part`s follow; only launches outside of graphs read them.

Shape suffixes: R rows at most, T tokens at most, L scored positions at most.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from worker.device.device import Device

Array = TypeVar("Array")

# Arrays begin at multiples of it: kernels read 16 bytes at once from aligned addresses, and Triton compiles them again
# for unaligned ones.
_ALIGNMENT = 64
# Bytes for parts: enough for 1,000 new blocks and 100 new rows. A step that needs more makes a second copy.
_ROOM = 32 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays(Generic[Array]):
    """The int32 arrays of a step's batch; see worker.step.batch.GpuBatch. sampled_rows_L and output_positions_L are for
    steps of decodes, in which every token is followed by a sampled one."""

    rows_R: Array
    query_starts: Array  # [R + 1]
    context_lens_R: Array
    # Rows whose token is chosen from unadjusted logits; -1 for padding, and for rows whose logits are adjusted first.
    sampled_rows_L: Array
    output_positions_L: Array
    # What is added to the positions of a row's tokens, in models whose positions have three axes.
    rope_shifts_R: Array
    token_ids_T: Array


class StepLayout:
    """The offsets of StepArrays in one buffer."""

    def __init__(self, *, max_rows: int, max_tokens: int, max_scored: int = 0, has_axes: bool = False) -> None:
        """max_scored: positions of decodes with drafts; 0: there are none, so each row has one. has_axes: positions
        have three axes."""
        max_scored = max(max_scored, max_rows)
        num_shifts = max_rows if has_axes else 0
        sizes = (max_rows, max_rows + 1, max_rows, max_scored, max_scored, num_shifts, max_tokens)
        self._places: list[tuple[int, int]] = []
        self.num_bytes = 0
        for size in sizes:
            self._places.append((self.num_bytes, self.num_bytes + 4 * size))
            self.num_bytes += _aligned(4 * size)

    def arrays(self, memory: torch.Tensor) -> StepArrays[torch.Tensor]:
        """Returns views into `memory`: uint8, num_bytes or more."""
        return StepArrays(**dict(zip(StepArrays.__slots__, self._views(memory), strict=True)))

    def host_arrays(self, memory: torch.Tensor) -> StepArrays[np.ndarray]:
        views = (view.numpy() for view in self._views(memory))
        return StepArrays(**dict(zip(StepArrays.__slots__, views, strict=True)))

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes to copy for a step of num_tokens; tokens come last in the buffer."""
        return self._places[-1][0] + 4 * num_tokens

    def _views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        return [memory[start:end].view(torch.int32) for start, end in self._places]


class Part:
    """An array of one step; `tensor` is its copy on the device once the step is sent."""

    __slots__ = ("array", "offset", "tensor")

    def __init__(self, array: np.ndarray, offset: int) -> None:
        self.array, self.offset = array, offset
        self.tensor: torch.Tensor


class StepSlot:
    """Host memory of one step in flight."""

    def __init__(self, device: Device, layout: StepLayout) -> None:
        self._device, self._layout = device, layout
        self._inputs = device.pinned(layout.num_bytes + _ROOM)
        self.arrays = layout.host_arrays(self._inputs)
        self._large = torch.empty(0, dtype=torch.uint8)
        self._outputs = device.pinned(1 << 12)
        self._parts: list[Part] = []
        self._part_bytes = 0
        # Waits for the step that uses this memory.
        self.wait: Callable[[], object] | None = None

    def clear(self) -> None:
        """Waits for the step that uses the slot; that step keeps a copy of its results."""
        if self.wait is not None:
            self.wait()
        self.wait = None
        self._parts, self._part_bytes = [], 0

    def add(self, array: np.ndarray) -> Part:
        """Adds an array to the step. It is copied when the step is sent."""
        part = Part(array, self._part_bytes)
        self._parts.append(part)
        self._part_bytes += _aligned(array.nbytes)
        return part

    def send(self, memory: torch.Tensor, num_tokens: int) -> None:
        """Copies the step to the device. memory: from `device_memory`, for StepArrays and parts; it may still hold
        tokens of longer steps beyond this step's."""
        start = self._layout.num_bytes
        if not self._parts:
            end = self._layout.bytes_for(num_tokens)
            memory[:end].copy_(self._inputs[:end], non_blocking=True)
            return
        if self._part_bytes <= _ROOM:
            _write(self._parts, self._inputs[start:])
            end = start + self._part_bytes
            memory[:end].copy_(self._inputs[:end], non_blocking=True)
            parts = memory[start:]
        else:
            if len(self._large) < self._part_bytes:
                self._large = self._device.pinned(1 << (self._part_bytes - 1).bit_length())
            _write(self._parts, self._large)
            memory[:start].copy_(self._inputs[:start], non_blocking=True)
            # Safe though temporary: the allocator reuses this memory only for later work of the same stream.
            parts = torch.empty(self._part_bytes, dtype=torch.uint8, device=memory.device)
            parts.copy_(self._large[: self._part_bytes], non_blocking=True)
        for part in self._parts:
            at_place = parts[part.offset : part.offset + part.array.nbytes]
            part.tensor = at_place.view(_TORCH_DTYPES[part.array.dtype]).view(part.array.shape)

    def receive(self, results: torch.Tensor) -> np.ndarray:
        """Queues a copy of the contiguous int32 results to the host. The returned array holds them once the device has
        reached that copy."""
        if results.nbytes > len(self._outputs):
            self._outputs = self._device.pinned(1 << (results.nbytes - 1).bit_length())
        outputs = self._outputs[: results.nbytes].view(torch.int32)
        outputs.copy_(results, non_blocking=True)
        return outputs.numpy()


class Staging:
    """A ring of slots, one more than steps in flight: the host fills one while the device may still read all others."""

    def __init__(self, device: Device, layout: StepLayout, max_steps_in_flight: int) -> None:
        self._slots = [StepSlot(device, layout) for _ in range(max_steps_in_flight + 1)]
        self._next = 0

    def next(self) -> StepSlot:
        """Returns the least recently used slot, after waiting for its step."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.clear()
        return slot

    def clear(self) -> None:
        """Waits for the steps of all slots."""
        for slot in self._slots:
            slot.clear()


def device_memory(device: Device, layout: StepLayout) -> torch.Tensor:
    """Allocates uint8 device memory for StepArrays and parts."""
    return torch.zeros(layout.num_bytes + _ROOM, dtype=torch.uint8, device=device.torch_device)


_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def _write(parts: list[Part], memory: torch.Tensor) -> None:
    host = memory.numpy()
    for part in parts:
        flat = np.ascontiguousarray(part.array).reshape(-1)
        host[part.offset : part.offset + flat.nbytes] = flat.view(np.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
