"""Memory for packed weights and KV, in huge pages where the system supports them.

A step reads every weight once, in order. Each page of 4 KiB needs its own address look-up, and a CPU's prefetching
stops at the end of a page. KV is in blocks all over the cache, each of which would need several look-ups.

A page is allocated, zeroed, at its first write, from the memory of the writing core's NUMA node. The threads that pack
weights and write KV are those that read them later, as far as the pool assigns tasks alike.
"""

import ctypes
import logging
import math
import mmap
import os
import threading
from collections.abc import Sequence

import torch

_ALIGNMENT = 64
_HUGE_PAGE = 2 * 2**20
# Small compared with a model, large compared with the waste at its end.
_MAPPING = 32 * 2**20
_SMALL = 2**20
# Populated at a time: some milliseconds of one core.
_PORTION = 8 * 2**20
_MADV_POPULATE_WRITE = 23  # Linux 5.14

_log = logging.getLogger("octavo.kernels")


class WeightMemory:
    """Allocates from large mappings. A mapping is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None
        self._used = 0

    def empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns zeros [num_elements], 64-byte aligned."""
        num_bytes = num_elements * dtype.itemsize
        if self._mapping is None or self._used + num_bytes > len(self._mapping):
            self._mapping, self._used = _map(max(_MAPPING, num_bytes))
        offset = self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return torch.frombuffer(self._mapping, dtype=dtype, count=num_elements, offset=offset)

    def take_back(self, tensor: torch.Tensor) -> None:
        """Takes back the tensor that was allocated last."""
        tensor.zero_()
        self._used -= -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros in a separate mapping. Parts that are never written cost no memory."""
    num_elements = math.prod(shape)
    mapping, offset = _map(num_elements * dtype.itemsize)
    return torch.frombuffer(mapping, dtype=dtype, count=num_elements, offset=offset).view(*shape)


def populate(tensors: Sequence[torch.Tensor]) -> None:
    """Has the system allocate the memory of tensors from `huge_zeros` that is not yet written, a portion of each tensor
    in turn; changes no number. Raises OSError where the system cannot."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for done in range(0, max(tensor.nbytes for tensor in tensors), _PORTION):
        for tensor in tensors:
            num_bytes = min(_PORTION, tensor.nbytes - done)
            if num_bytes > 0 and madvise(tensor.data_ptr() + done, num_bytes, _MADV_POPULATE_WRITE) != 0:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))


def populate_in_background(tensors: Sequence[torch.Tensor], cores: Sequence[int]) -> threading.Thread:
    """Populates tensors in a thread of low priority, on any of the cores (none: all), so that computing goes on. Logs a
    warning where the system cannot."""

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        if cores:
            os.sched_setaffinity(0, cores)
        try:
            populate(tensors)
        except OSError as error:
            _log.warning(
                "memory is allocated by the steps that first write it: madvise: %s (Linux 5.14 can)", error.strerror
            )

    thread = threading.Thread(target=run, name="populate", daemon=True)
    thread.start()
    return thread


def passing_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialized memory for short-lived tensors, in a separate mapping unless small. Freed memory from malloc would
    stay trapped between long-lived allocations, and add up to several times its size."""
    if math.prod(shape) * dtype.itemsize < _SMALL:
        return torch.empty(*shape, dtype=dtype)
    return huge_zeros(shape, dtype)


def _map(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Returns a mapping and the offset of its first huge page."""
    # Private: most systems make no huge pages of shared memory, Python's default.
    mapping = mmap.mmap(
        -1, -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping, -address % _HUGE_PAGE
