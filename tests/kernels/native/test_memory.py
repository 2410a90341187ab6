import ctypes
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.native.memory import WeightMemory, huge_zeros, populate_in_background

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_pieces_are_aligned_and_apart() -> None:
    memory = WeightMemory()
    pieces = [memory.empty(count, dtype) for count in (1, 17, 1000) for dtype in (torch.bfloat16, torch.float32)]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        piece.fill_(number)
    for number, piece in enumerate(pieces):
        assert bool((piece == number).all())


def test_a_piece_taken_back_is_given_again_as_zeros() -> None:
    memory = WeightMemory()
    kept = memory.empty(100, torch.uint8)
    piece = memory.empty(1000, torch.uint8).fill_(7)
    memory.take_back(piece)
    again = memory.empty(1000, torch.uint8)
    assert again.data_ptr() == piece.data_ptr() >= kept.data_ptr() + 100
    assert not again.any()


def test_a_piece_larger_than_a_mapping_has_its_own() -> None:
    memory = WeightMemory()
    large = memory.empty(40 * 2**20, torch.uint8)
    large[-1] = 7
    after = memory.empty(10, torch.float32)
    assert large.numel() == 40 * 2**20
    assert not large.data_ptr() <= after.data_ptr() < large.data_ptr() + large.numel()


def test_a_mapping_goes_with_its_last_tensor() -> None:
    """A process that loads several models in turn must not keep the weights of all."""
    memory = WeightMemory()
    first = memory.empty(30 * 2**20, torch.uint8)
    mapping = memory._mapping
    assert isinstance(mapping, mmap.mmap)
    gone = weakref.ref(mapping)
    del mapping
    memory.empty(30 * 2**20, torch.uint8)
    assert gone() is not None
    del first
    assert gone() is None


def _of_mapping(tensor: torch.Tensor, field: str) -> int:
    """A field in KiB, from /proc/self/smaps, of the mapping that holds a tensor."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= tensor.data_ptr() < end
        elif inside and first == f"{field}:":
            return int(line.split()[1])
    raise AssertionError(f"no {field} of that address")


@pytest.mark.skipif(not THP.exists() or "[never]" in THP.read_text(), reason="the system makes no huge pages")
def test_memory_is_in_huge_pages() -> None:
    """Shared anonymous mappings, Python's default, get no huge pages."""
    weights, blocks = WeightMemory().empty(8 * 2**20, torch.uint8), huge_zeros((8, 2**20), torch.uint8)
    for memory in (weights, blocks):
        memory.fill_(1)
        assert _of_mapping(memory, "AnonHugePages") > 0


def test_what_is_not_written_costs_no_memory() -> None:
    """A KV cache is allocated at its full size but takes only the memory that sequences have used."""
    blocks = huge_zeros((64, 2**20), torch.uint8)
    # The kernel may join the mapping with another one beside it, so only the growth counts.
    before = _of_mapping(blocks, "Rss")
    blocks[3] = 1
    assert _of_mapping(blocks, "Rss") - before <= 4096
    assert bool((blocks[3] == 1).all())
    assert not blocks[60:].any()


def _num_resident(tensor: torch.Tensor) -> int:
    """The number of a tensor's pages that the system has allocated."""
    resident = np.empty(-(-tensor.nbytes // mmap.PAGESIZE), np.uint8)
    mincore = ctypes.CDLL(None).mincore
    assert mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), resident.ctypes) == 0
    return int((resident & 1).sum())


def test_memory_is_allocated_ahead_and_keeps_what_is_written() -> None:
    tensors = [huge_zeros((num_bytes,), torch.uint8) for num_bytes in (20 * 2**20, 9 * 2**20 + 5)]
    for tensor in tensors:
        tensor[[7, -1]] = 3
        assert _num_resident(tensor) <= 2 * 512
    populate_in_background(tensors, sorted(os.sched_getaffinity(0))).join()
    for tensor in tensors:
        assert _num_resident(tensor) == -(-tensor.nbytes // mmap.PAGESIZE)
        assert (int(tensor.sum()), tensor[7], tensor[-1]) == (6, 3, 3)


def test_a_system_that_cannot_allocate_ahead_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The tensor is not in pages of its own, which madvise rejects."""
    populate_in_background([torch.zeros(3 * 4096, dtype=torch.uint8)[1:]], ()).join()
    assert "madvise: Invalid argument" in caplog.text
