"""Memory for packed weights and KV: in huge pages, where the system has some.

A step reads every weight once, in order. In pages of 4 KiB, each needs a look-up of its own, and a CPU's prefetching
ends at a page's end. KV lies in blocks all over the cache, of which each would need several.

A page comes, zeroed, when it is first written, from the memory of the NUMA node whose core writes it. Weights are
packed and KV is written by the threads that read them later, as far as the pool deals tasks alike.
"""

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch

_ALIGNMENT = 64
_HUGE_PAGE = 2 * 2**20
# Small next to a model, large next to what is lost at its end.
_MAPPING = 32 * 2**20
_SMALL = 2**20


class WeightMemory:
    """Hands out pieces of large mappings. A mapping is given back when the last tensor in it is gone."""

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None
        self._used = 0

    def empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """[num_elements], 64-byte aligned, zeros."""
        num_bytes = num_elements * dtype.itemsize
        if self._mapping is None or self._used + num_bytes > len(self._mapping):
            self._mapping, self._used = _map(max(_MAPPING, num_bytes))
        offset = self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return torch.frombuffer(self._mapping, dtype=dtype, count=num_elements, offset=offset)


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """In a mapping of its own. A part that is never written costs no memory."""
    num_elements = math.prod(shape)
    mapping, offset = _map(num_elements * dtype.itemsize)
    return torch.frombuffer(mapping, dtype=dtype, count=num_elements, offset=offset).view(*shape)


def passing_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Of any contents, for what goes again while others stay. In a mapping of its own, unless it is small: what malloc
    had given would be kept between allocations that stay, and all of that comes to several times its size."""
    if math.prod(shape) * dtype.itemsize < _SMALL:
        return torch.empty(*shape, dtype=dtype)
    return huge_zeros(shape, dtype)


def give_back_free_memory() -> None:
    """What malloc keeps of freed memory, to the system; where the C library can."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _map(num_bytes: int) -> tuple[mmap.mmap, int]:
    """A mapping, and where its first huge page begins."""
    # Private: of shared memory, Python's default, most systems make no huge pages.
    mapping = mmap.mmap(
        -1, -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping, -address % _HUGE_PAGE
