"""A GPU that is only a number of bytes, to test a worker's messages when they run out."""

from collections.abc import Callable

import torch

from worker.device.device import DeviceMemory, InterpretedDevice


class SimulatedGpu(InterpretedDevice):
    """others: bytes that other processes use."""

    def __init__(self, *, total: int, others: int = 0) -> None:
        super().__init__()
        self.total, self.others = total, others
        self._allocated = self._peak = 0

    def take(self, num_bytes: int) -> "Taken":
        """Raises OutOfMemoryError as torch does."""
        if self._allocated + self.others + num_bytes > self.total:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes")
        return Taken(self, num_bytes)

    def count(self, num_bytes: int) -> None:
        self._allocated += num_bytes
        self._peak = max(self._peak, self._allocated)

    def memory(self) -> DeviceMemory:
        free = self.total - self.others - self._allocated
        return DeviceMemory(total=self.total, free=free, allocated=self._allocated, reserved=self._allocated)

    def peak_bytes(self, body: Callable[[], None]) -> int:
        before = self._peak = self._allocated
        body()
        return self._peak - before


class Taken:
    """Bytes of a GPU, allocated until this object is deleted."""

    def __init__(self, gpu: SimulatedGpu, num_bytes: int) -> None:
        self._gpu, self._num_bytes = gpu, num_bytes
        gpu.count(num_bytes)

    def __del__(self) -> None:
        self._gpu.count(-self._num_bytes)
