import pytest
import torch

from kernels.kv_cache.write import reference
from kernels.kv_cache.write.torch_cpu import cache_write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_its_slots_and_no_other(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cache = torch.randn(6, 8, 2, 3, 4).to(dtype)
    expected = cache.clone()
    wide = torch.randn(5, 40)
    kv = wide[:, 16:]  # as k and v lie beside q
    slots = torch.tensor([47, 8, 13, 9, 30])
    reference.cache_write(expected, kv, slots)
    cache_write(cache, kv, slots)
    assert torch.equal(cache, expected)
