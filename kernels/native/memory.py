"""Memory for packed weights and KV, in huge pages where the system supports them.

A step reads every weight once, in order. Each page of 4 KiB needs its own address look-up, and a CPU's prefetching
stops at the end of a page. KV is in blocks all over the cache, each of which would need several look-ups.

A page is allocated, zeroed, at its first write, from the memory of the writing core's NUMA node. The threads that pack
weights and write KV are those that read them later, as far as the pool assigns tasks alike.
"""

import math
import mmap
from collections.abc import Sequence

import torch

_ALIGNMENT = 64
_HUGE_PAGE = 2 * 2**20
# Small compared with a model, large compared with the waste at its end.
_MAPPING = 32 * 2**20
_SMALL = 2**20


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


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros in a separate mapping. Parts that are never written cost no memory."""
    num_elements = math.prod(shape)
    mapping, offset = _map(num_elements * dtype.itemsize)
    return torch.frombuffer(mapping, dtype=dtype, count=num_elements, offset=offset).view(*shape)


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
