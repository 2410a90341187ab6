"""The GPU's cache write: into its slots and no other number, rounded or quantized as the reference has it."""

import pytest
import torch

from kernels.kv_cache.layout import gpu_cache_shape
from kernels.kv_cache.write import reference
from kernels.kv_cache.write import triton as gpu
from kernels.kv_cache.write.triton import cache_write
from tests.support.gpu.gpu import DEVICE

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def _kv(num_tokens: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v as they lie in qkv, after three heads of q."""
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(num_tokens, 3 + 2 * num_kv_heads, head_size, generator=generator).to(dtype).to(DEVICE)
    return heads[:, 3 : 3 + num_kv_heads], heads[:, 3 + num_kv_heads :]


def _cache(
    dtype: torch.dtype, *, num_blocks: int = 4, block_size: int = 8, heads: int = 2, size: int = 64
) -> torch.Tensor:
    """Of NaN: what is not written is seen."""
    shape = gpu_cache_shape(num_blocks=num_blocks, block_size=block_size, num_kv_heads=heads, head_size=size)
    return torch.full(shape, float("nan"), dtype=torch.float32).to(dtype).to(DEVICE)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize(
    ("num_kv_heads", "head_size", "block_size"), [(1, 64, 8), (3, 80, 16), (2, 256, 32), (5, 96, 8)]
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_writes_its_slots_and_no_other(dtype: torch.dtype, num_kv_heads: int, head_size: int, block_size: int) -> None:
    k, v = _kv(5, num_kv_heads, head_size, dtype)
    cache = _cache(dtype, block_size=block_size, heads=num_kv_heads, size=head_size)
    expected = cache.clone()
    slots = torch.tensor([4 * block_size - 1, block_size, 3, -1, 2 * block_size + 5], device=DEVICE)
    reference.gpu_cache_write(k, v, expected, slots)
    cache_write(k, v, cache, slots)
    assert torch.equal(_bits(cache), _bits(expected))


@pytest.mark.parametrize("cache_dtype", FLOATS)
def test_rounds_to_the_dtype_of_the_cache(cache_dtype: torch.dtype) -> None:
    k, v = _kv(3, 2, 64, torch.float32)
    cache = _cache(cache_dtype)
    expected, slots = cache.clone(), torch.tensor([1, 9, 30], dtype=torch.int32, device=DEVICE)
    reference.gpu_cache_write(k, v, expected, slots)
    cache_write(k, v, cache, slots)
    assert torch.equal(_bits(cache), _bits(expected))


@pytest.mark.parametrize("as_bits", [False, True])
@pytest.mark.parametrize("by_head", [False, True])
def test_quantizes_with_the_scales_of_keys_and_values(
    by_head: bool, as_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each head has a scale of its own, so one taken from a neighbour shows. as_bits: as GPUs without e4m3 store it."""
    if as_bits:
        monkeypatch.setattr(gpu, "kernel_view", lambda cache: cache.view(torch.uint8))
    k, v = _kv(4, 3, 64, torch.bfloat16)
    cache = _cache(torch.float8_e4m3fn, heads=3)
    expected, slots = cache.clone(), torch.tensor([31, 0, -1, 17], device=DEVICE)
    k_scale, v_scale = torch.tensor([0.01, 0.37, 2.0], device=DEVICE), torch.tensor([1.3, 0.005, 0.11], device=DEVICE)
    if not by_head:
        k_scale, v_scale = k_scale[1:2], v_scale[1:2]
    reference.gpu_cache_write(k, v, expected, slots, k_scale, v_scale)
    cache_write(k, v, cache, slots, k_scale=k_scale, v_scale=v_scale)
    assert torch.equal(_bits(cache), _bits(expected))


def test_large_numbers_saturate_and_nan_stays() -> None:
    """A key that overflowed to NaN would take its whole row's attention with it."""
    k, v = _kv(1, 1, 64, torch.float32)
    k[0, 0, :3] = torch.tensor([1e6, -1e6, float("nan")])
    cache, ones = _cache(torch.float8_e4m3fn, heads=1), torch.ones(1, device=DEVICE)
    cache_write(k, v, cache, torch.tensor([0], device=DEVICE), k_scale=ones, v_scale=ones)
    written = cache[0, 0, 0, 0, :3].float()
    assert written[:2].tolist() == [448.0, -448.0]
    assert written[2].isnan()


def test_only_padding_touches_nothing() -> None:
    k, v = _kv(3, 2, 64, torch.bfloat16)
    cache = _cache(torch.bfloat16)
    cache_write(k, v, cache, torch.full((3,), -1, device=DEVICE))
    assert cache.isnan().all()
    cache_write(k, v, cache, torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert cache.isnan().all()


def test_rows_beyond_the_slots_are_not_written() -> None:
    """A step's buffers are longer than the step."""
    k, v = _kv(6, 2, 64, torch.bfloat16)
    cache = _cache(torch.bfloat16)
    cache_write(k, v, cache, torch.tensor([5, 6], device=DEVICE))
    assert torch.equal(cache[0, :, :, 5:7], torch.stack((k[:2], v[:2])).transpose(1, 2))
    assert (~cache.isnan()).sum() == 2 * k[:2].numel()


def test_chunks_and_order_do_not_matter() -> None:
    k, v = _kv(7, 3, 80, torch.bfloat16)
    slots = torch.tensor([3, 30, 4, -1, 17, 0, 31], device=DEVICE)
    once, chunked, permuted = (_cache(torch.bfloat16, heads=3, size=80) for _ in range(3))
    cache_write(k, v, once, slots)
    for tokens in (slice(0, 1), slice(1, 5), slice(5, 7)):
        cache_write(k[tokens], v[tokens], chunked, slots[tokens])
    order = torch.tensor([6, 2, 0, 5, 1, 4, 3], device=DEVICE)
    cache_write(k[order], v[order], permuted, slots[order])
    assert torch.equal(_bits(chunked), _bits(once))
    assert torch.equal(_bits(permuted), _bits(once))


def test_reaches_slots_beyond_two_to_the_31_numbers() -> None:
    """The cache of 3 GiB is virtual memory but for the pages that are written."""
    shape = gpu_cache_shape(num_blocks=(1 << 21) + (1 << 20), block_size=8, num_kv_heads=1, head_size=64)
    cache = torch.empty(shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    k, v = _kv(1, 1, 64, torch.bfloat16)
    ones, slot = torch.ones(1, device=DEVICE), 8 * shape[0] - 1
    cache_write(k, v, cache, torch.tensor([slot], device=DEVICE), k_scale=ones, v_scale=ones)
    assert torch.equal(cache[-1, :, 0, 7].float(), torch.stack((k[0, 0], v[0, 0])).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(
    ("cache_dtype", "scale", "message"),
    [
        (torch.float8_e4m3fn, None, "k_scale is None"),
        (torch.bfloat16, torch.ones(1), "is for a cache of float8_e4m3fn"),
        (torch.float8_e4m3fn, torch.ones(3), r"k_scale is torch.float32 \(3,\)"),
        (torch.float8_e4m3fn, torch.ones(1, dtype=torch.float64), "k_scale is torch.float64"),
    ],
)
def test_scales_go_with_the_cache(cache_dtype: torch.dtype, scale: torch.Tensor | None, message: str) -> None:
    k, v = _kv(1, 2, 64, torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        cache_write(k, v, _cache(cache_dtype), torch.tensor([0]), k_scale=scale, v_scale=scale)


def test_heads_of_another_cache_are_refused() -> None:
    k, v = _kv(1, 2, 64, torch.bfloat16)
    with pytest.raises(ValueError, match=r"at least 1, 3, 64"):
        cache_write(k, v, _cache(torch.bfloat16, heads=3), torch.tensor([0]))
