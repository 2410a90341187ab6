import mmap
import weakref

import torch

from kernels.native.memory import WeightMemory


def test_pieces_are_aligned_and_apart() -> None:
    memory = WeightMemory()
    pieces = [memory.empty(count, dtype) for count in (1, 17, 1000) for dtype in (torch.bfloat16, torch.float32)]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        piece.fill_(number)
    for number, piece in enumerate(pieces):
        assert bool((piece == number).all())


def test_a_piece_larger_than_a_mapping_has_its_own() -> None:
    memory = WeightMemory()
    large = memory.empty(40 * 2**20, torch.uint8)
    large[-1] = 7
    after = memory.empty(10, torch.float32)
    assert large.numel() == 40 * 2**20
    assert not large.data_ptr() <= after.data_ptr() < large.data_ptr() + large.numel()


def test_a_mapping_goes_with_its_last_tensor() -> None:
    """A process that loads one model after another must not keep the weights of all."""
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
