"""The GPU's cache write of MLA: it writes its slots and nothing else, rounded or quantized like the reference."""

import pytest
import torch

from kernels.attention.latent.triton import LatentShape
from kernels.kv_cache.latent_write import reference
from kernels.kv_cache.latent_write import triton as gpu
from kernels.kv_cache.latent_write.triton import mla_cache_write
from kernels.kv_cache.layout import mla_cache_shape
from tests.support.gpu.gpu import DEVICE

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SHAPE = LatentShape(num_heads=1, latent_size=64, rope_size=16)


def _entries(num_tokens: int, shape: LatentShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and rope parts, strided as in a projection, where the queries' part lies beside them."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(num_tokens, 32 + shape.entry_size, generator=generator).to(dtype).to(DEVICE)
    return wide[:, 32 : 32 + shape.latent_size], wide[:, 32 + shape.latent_size :]


def _cache(dtype: torch.dtype, shape: LatentShape = SHAPE, block_size: int = 8) -> torch.Tensor:
    """A cache full of NaN, so that entries left unwritten show."""
    size = mla_cache_shape(num_blocks=4, block_size=block_size, shape=shape)
    return torch.full(size, float("nan")).to(dtype).to(DEVICE)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize("shape", [SHAPE, LatentShape(num_heads=1)], ids=["small", "DeepSeek"])
@pytest.mark.parametrize("cache_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_writes_its_slots_and_no_other(dtype: torch.dtype, cache_dtype: torch.dtype, shape: LatentShape) -> None:
    """Four slots for six tokens, as a step's buffers may be longer than the step."""
    latent, rope = _entries(6, shape, dtype)
    cache = _cache(cache_dtype, shape)
    expected, slots = cache.clone(), torch.tensor([31, 8, -1, 3], device=DEVICE)
    reference.mla_cache_write(latent, rope, expected, slots)
    mla_cache_write(latent, rope, cache, slots)
    assert torch.equal(_bits(cache), _bits(expected))


@pytest.mark.parametrize("as_bits", [False, True])
def test_quantizes_latent_and_rope_with_one_scale(as_bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """as_bits: store it as GPUs without e4m3 do."""
    if as_bits:
        monkeypatch.setattr(gpu, "kernel_view", lambda cache: cache.view(torch.uint8))
    latent, rope = _entries(4, SHAPE, torch.bfloat16)
    latent[0, :2] = torch.tensor([1e6, float("nan")])
    cache, scale = _cache(torch.float8_e4m3fn, block_size=16), torch.tensor([0.37], device=DEVICE)
    expected, slots = cache.clone(), torch.tensor([63, 0, -1, 17], dtype=torch.int32, device=DEVICE)
    reference.mla_cache_write(latent, rope, expected, slots, scale)
    mla_cache_write(latent, rope, cache, slots, kv_scale=scale)
    assert torch.equal(_bits(cache), _bits(expected))
    assert cache[3, 15, 0].float() == 448.0


def test_chunks_and_order_do_not_matter() -> None:
    latent, rope = _entries(7, SHAPE, torch.bfloat16)
    slots = torch.tensor([3, 30, 4, -1, 17, 0, 31], device=DEVICE)
    once, chunked, permuted = (_cache(torch.bfloat16) for _ in range(3))
    mla_cache_write(latent, rope, once, slots)
    for tokens in (slice(0, 1), slice(1, 5), slice(5, 7)):
        mla_cache_write(latent[tokens], rope[tokens], chunked, slots[tokens])
    order = torch.tensor([6, 2, 0, 5, 1, 4, 3], device=DEVICE)
    mla_cache_write(latent[order], rope[order], permuted, slots[order])
    assert torch.equal(_bits(chunked), _bits(once))
    assert torch.equal(_bits(permuted), _bits(once))


def test_only_padding_touches_nothing() -> None:
    latent, rope = _entries(3, SHAPE, torch.bfloat16)
    cache = _cache(torch.bfloat16)
    mla_cache_write(latent, rope, cache, torch.full((3,), -1, device=DEVICE))
    mla_cache_write(latent, rope, cache, torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert cache.isnan().all()


def test_reaches_slots_beyond_two_to_the_31_numbers() -> None:
    """The cache of 2 GiB is virtual memory except for the pages that are written."""
    num_blocks = (1 << 31) // (128 * 576) + 8
    cache = torch.empty(num_blocks, 128, 576, dtype=torch.float8_e4m3fn, device=DEVICE)
    latent, rope = _entries(1, LatentShape(num_heads=1), torch.bfloat16)
    one, slot = torch.ones(1, device=DEVICE), 128 * num_blocks - 1
    mla_cache_write(latent, rope, cache, torch.tensor([slot], device=DEVICE), kv_scale=one)
    assert torch.equal(cache[-1, 127].float(), torch.cat((latent[0], rope[0])).to(torch.float8_e4m3fn).float())


def test_what_does_not_fit_is_refused() -> None:
    latent, rope = _entries(2, SHAPE, torch.bfloat16)
    slots = torch.tensor([0, 1], device=DEVICE)
    with pytest.raises(ValueError, match="kv_scale is None"):
        mla_cache_write(latent, rope, _cache(torch.float8_e4m3fn), slots)
    with pytest.raises(ValueError, match="kv_scale is for a cache of float8_e4m3fn"):
        mla_cache_write(latent, rope, _cache(torch.bfloat16), slots, kv_scale=torch.ones(1, device=DEVICE))
    with pytest.raises(ValueError, match=r"\[num_blocks, block_size, 72\]"):
        mla_cache_write(latent, rope[:, :8], _cache(torch.bfloat16), slots)
    with pytest.raises(ValueError, match="at least 2 tokens"):
        mla_cache_write(latent[:1], rope, _cache(torch.bfloat16), slots)
