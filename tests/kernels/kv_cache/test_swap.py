import pytest
import torch

from kernels.kv_cache.swap import block_copy, reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_copies_its_blocks_and_no_other(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source, target = torch.randn(6, 8, 2, 3, 4).to(dtype), torch.randn(4, 8, 2, 3, 4).to(dtype)
    before, expected = source.clone(), target.clone()
    # One block is copied to two places.
    sources, targets = torch.tensor([5, 1, 5]), torch.tensor([0, 3, 2])
    reference.block_copy(source, expected, sources, targets)
    block_copy(source, target, sources, targets)
    assert torch.equal(target, expected)
    assert torch.equal(target[0], source[5])
    assert torch.equal(source, before)


def test_there_and_back_restores_a_block() -> None:
    torch.manual_seed(0)
    cache, host = torch.randn(5, 8, 2, 1, 4), torch.empty(3, 8, 2, 1, 4)
    block = cache[4].clone()
    block_copy(cache, host, torch.tensor([4]), torch.tensor([1]))
    cache.zero_()
    block_copy(host, cache, torch.tensor([1]), torch.tensor([2]))
    assert torch.equal(cache[2], block)
    assert not cache[4].any()
