"""Memory for packed weights: in huge pages, where the system has some.

A step reads every weight once, in order. In pages of 4 KiB, each needs a look-up of its own, and a CPU's prefetching
ends at a page's end.
"""

import mmap

import torch

_ALIGNMENT = 64
_HUGE_PAGE = 2 * 2**20
# Small next to a model, large next to what is lost at its end.
_MAPPING = 32 * 2**20


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


def _map(num_bytes: int) -> tuple[mmap.mmap, int]:
    """A mapping, and where its first huge page begins."""
    mapping = mmap.mmap(-1, -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE + _HUGE_PAGE)
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping, -address % _HUGE_PAGE
