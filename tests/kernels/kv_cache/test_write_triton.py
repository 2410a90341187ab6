"""The GPU's fused write of qkv into the KV cache, against float64 and against its unfused parts."""

import pytest
import torch

from kernels.elementwise.rms_norm.reference import rms_norm
from kernels.elementwise.rope.reference import rope
from kernels.elementwise.rope.triton import rope_
from kernels.kv_cache.layout import gpu_cache_shape
from kernels.kv_cache.write import triton as gpu
from kernels.kv_cache.write.reference import gpu_cache_write
from kernels.kv_cache.write.triton import HeadNorms, rope_cache_write
from tests.support.gpu.gpu import DEVICE
from tests.support.kernels.rounding import assert_rounded, assert_same_e4m3

EPS = 1e-6
SLOTS = torch.tensor([31, 4, -1, 17], device=DEVICE)
WRITTEN = [0, 1, 3]


def _qkv(num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Four tokens in wider memory whose rest is NaN."""
    generator = torch.Generator().manual_seed(0)
    row = (num_heads + 2 * num_kv_heads) * head_size
    wide = torch.full((4, row + 16), float("nan"))
    wide[:, :row] = torch.randn(4, row, generator=generator)
    return wide.to(dtype).to(DEVICE)


def _cache(dtype: torch.dtype, num_kv_heads: int, head_size: int) -> torch.Tensor:
    shape = gpu_cache_shape(num_blocks=4, block_size=8, num_kv_heads=num_kv_heads, head_size=head_size)
    return torch.full(shape, float("nan")).to(dtype).to(DEVICE)


def _turns(num_pairs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(positions, frequencies, their table)."""
    positions, frequencies = torch.tensor([17, 0, 3, 40]), 1.0 / 10000.0 ** (torch.arange(num_pairs) / num_pairs)
    angles = positions.double()[:, None] * frequencies.double()
    return positions, frequencies, torch.cat((angles.cos(), angles.sin()), dim=1).float().to(DEVICE)


def _unturned(num_tokens: int) -> torch.Tensor:
    """A rope table of zero angles, so that k is written unchanged."""
    return torch.tensor([1.0, 0.0]).repeat_interleave(32).repeat(num_tokens, 1).to(DEVICE)


def _written(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the tokens that have slots, [3, K, D] each."""
    slots = SLOTS[WRITTEN].cpu()
    return cache[slots // 8, 0, :, slots % 8], cache[slots // 8, 1, :, slots % 8]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "num_pairs"), [(1, 1, 64, 32), (9, 3, 80, 20), (16, 5, 128, 64)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_float64(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    num_pairs: int,
    norms: bool,
    interleaved: bool,
) -> None:
    qkv, cache = _qkv(num_heads, num_kv_heads, head_size, dtype), _cache(dtype, num_kv_heads, head_size)
    before, (positions, frequencies, table) = qkv.clone(), _turns(num_pairs)
    generator = torch.Generator().manual_seed(3)
    q_weight, k_weight = (torch.rand(head_size, generator=generator) + 0.5 for _ in range(2))
    num_columns = (num_heads + 2 * num_kv_heads) * head_size
    heads = before[:, :num_columns].cpu().unflatten(1, (-1, head_size)).double()
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms:
        q, k = rms_norm(q, q_weight, EPS), rms_norm(k, k_weight, EPS)
    q, k = (rope(x, positions, frequencies, 1.0, interleaved=interleaved) for x in (q, k))

    out = rope_cache_write(
        qkv,
        table,
        cache,
        SLOTS,
        num_heads=num_heads,
        interleaved=interleaved,
        head_norms=HeadNorms(q_weight.to(DEVICE), k_weight.to(DEVICE), EPS) if norms else None,
    )
    assert_rounded(out, q, error=2e-6)
    keys, values = _written(cache)
    assert_rounded(keys, k[WRITTEN], error=2e-6)
    assert torch.equal(values.cpu(), v[WRITTEN].to(dtype))
    # Only q and those slots are touched.
    assert out.data_ptr() == qkv.data_ptr()
    num_q = num_heads * head_size
    assert torch.equal(qkv[:, num_q:].view(torch.uint8), before[:, num_q:].view(torch.uint8))
    assert (~cache.isnan()).sum() == keys.numel() + values.numel()


@pytest.mark.parametrize("as_bits", [False, True])
@pytest.mark.parametrize("num_scales", [1, 3])
def test_quantizes_with_the_scales_of_keys_and_values(
    num_scales: int, as_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """qkv is float32, which avoids a rounding in between. as_bits: store it as GPUs without e4m3 do."""
    if as_bits:
        monkeypatch.setattr(gpu, "kernel_view", lambda cache: cache.view(torch.uint8))
    qkv, cache, (_, _, table) = _qkv(4, 3, 64, torch.float32), _cache(torch.float8_e4m3fn, 3, 64), _turns(32)
    k_scale = torch.tensor([0.01, 0.37, 2.0], device=DEVICE)[:num_scales]
    v_scale = torch.tensor([1.3, 0.005, 0.11], device=DEVICE)[:num_scales]
    turned = qkv[:, : 10 * 64].clone().unflatten(1, (10, 64))
    rope_(turned[:, :4], turned[:, 4:7], table)
    expected = cache.clone()
    gpu_cache_write(turned[:, 4:7], turned[:, 7:], expected, SLOTS, k_scale, v_scale)
    rope_cache_write(qkv, table, cache, SLOTS, num_heads=4, k_scale=k_scale, v_scale=v_scale)
    # A GPU may contract the products of a turn differently here and in rope_.
    assert_same_e4m3(cache, expected, ulps=0 if DEVICE == "cpu" else 1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_is_rope_and_cache_write_in_one(interleaved: bool) -> None:
    """Uses a table indexed by position, and more heads than one program takes."""
    num_heads, num_kv_heads, head_size = 17, 4, 128
    qkv, table = _qkv(num_heads, num_kv_heads, head_size, torch.bfloat16), torch.randn(50, 64).to(DEVICE)
    positions = torch.tensor([3, 49, 0, 3], dtype=torch.int32, device=DEVICE)
    other, fused, unfused = qkv.clone(), *(_cache(torch.bfloat16, num_kv_heads, head_size) for _ in range(2))
    heads = other[:, : (num_heads + 2 * num_kv_heads) * head_size].unflatten(1, (-1, head_size))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    rope_(q, k, table, positions_T=positions, interleaved=interleaved)
    gpu_cache_write(k, v, unfused, SLOTS)
    out = rope_cache_write(
        qkv, table, fused, SLOTS, num_heads=num_heads, positions_T=positions, interleaved=interleaved
    )
    # A GPU may contract the products of a turn differently here and in rope_: then the last bit of bf16 may differ.
    rtol, atol = (0, 0) if DEVICE == "cpu" else (2**-7, 1e-6)
    torch.testing.assert_close(out, q, rtol=rtol, atol=atol)
    torch.testing.assert_close(fused, unfused, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounds_to_the_dtype_of_the_cache(cache_dtype: torch.dtype) -> None:
    qkv, cache = _qkv(1, 2, 64, torch.float32), _cache(cache_dtype, 2, 64)
    expected, slots = cache.clone(), torch.tensor([1, 9, 30, -1], dtype=torch.int32, device=DEVICE)
    heads = qkv[:, : 5 * 64].unflatten(1, (5, 64))
    gpu_cache_write(heads[:, 1:3], heads[:, 3:], expected, slots)
    rope_cache_write(qkv, _unturned(4), cache, slots, num_heads=1)
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def test_large_numbers_saturate_and_nan_stays() -> None:
    """A key that overflowed to NaN would spoil its whole row's attention."""
    qkv, cache, ones = _qkv(1, 1, 64, torch.float32), _cache(torch.float8_e4m3fn, 1, 64), torch.ones(1, device=DEVICE)
    # Where the first token's key and value begin.
    for first in (64, 128):
        qkv[0, first : first + 3] = torch.tensor([1e6, -1e6, float("nan")])
    rope_cache_write(qkv, _unturned(4), cache, SLOTS, num_heads=1, k_scale=ones, v_scale=ones)
    for written in cache[31 // 8, :, 0, 31 % 8, :3].float():
        assert written[:2].tolist() == [448.0, -448.0]
        assert written[2].isnan()


def test_only_padding_touches_nothing() -> None:
    qkv, cache, (_, _, table) = _qkv(1, 2, 64, torch.bfloat16), _cache(torch.bfloat16, 2, 64), _turns(32)
    rope_cache_write(qkv, table, cache, torch.full((4,), -1, device=DEVICE), num_heads=1)
    assert cache.isnan().all()
    rope_cache_write(qkv[:0], table[:0], cache, torch.empty(0, dtype=torch.int64, device=DEVICE), num_heads=1)
    assert cache.isnan().all()


def test_chunks_and_order_do_not_matter() -> None:
    qkv, (_, _, table) = _qkv(2, 3, 80, torch.bfloat16), _turns(32)
    caches = [_cache(torch.bfloat16, 3, 80) for _ in range(3)]
    orders = [[[0, 1, 2, 3]], [[0], [1, 2], [3]], [[3, 2, 0, 1]]]
    for cache, order in zip(caches, orders, strict=True):
        for tokens in order:
            rope_cache_write(qkv[tokens], table[tokens], cache, SLOTS[tokens], num_heads=2)
    for cache in caches[1:]:
        assert torch.equal(cache.view(torch.uint8), caches[0].view(torch.uint8))


def test_reaches_slots_beyond_two_to_the_31_numbers() -> None:
    """The cache of 3 GiB is virtual memory except for the pages that are written."""
    shape = gpu_cache_shape(num_blocks=(1 << 21) + (1 << 20), block_size=8, num_kv_heads=1, head_size=64)
    cache = torch.empty(shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    qkv, ones = _qkv(1, 1, 64, torch.bfloat16)[:1], torch.ones(1, device=DEVICE)
    slots = torch.tensor([8 * shape[0] - 1], device=DEVICE)
    rope_cache_write(qkv, _unturned(1), cache, slots, num_heads=1, k_scale=ones, v_scale=ones)
    expected = qkv[0, 64 : 3 * 64].unflatten(0, (2, 64)).to(torch.float8_e4m3fn)
    assert torch.equal(cache[-1, :, 0, 7].float(), expected.float())


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
    qkv, cache = _qkv(1, 2, 64, torch.bfloat16), _cache(cache_dtype, 2, 64)
    with pytest.raises(ValueError, match=message):
        rope_cache_write(qkv, _unturned(4), cache, SLOTS, num_heads=1, k_scale=scale, v_scale=scale)


def test_padding_of_any_content_changes_nothing_else() -> None:
    """Padding as in graphs: position 0, slot -1, and whatever the earlier layers computed for it."""
    qkv, cache = _qkv(2, 1, 64, torch.bfloat16), _cache(torch.bfloat16, 1, 64)
    table, positions = torch.randn(50, 64).to(DEVICE), torch.tensor([3, 7, 0, 0], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([31, 4, -1, -1], device=DEVICE)
    alone, alone_cache = qkv[:2].clone(), cache.clone()
    qkv[2:] = float("nan")
    norms = HeadNorms(torch.ones(64, device=DEVICE), torch.ones(64, device=DEVICE), EPS)
    q = rope_cache_write(qkv, table, cache, slots, num_heads=2, positions_T=positions, head_norms=norms)
    expected = rope_cache_write(
        alone, table, alone_cache, slots[:2], num_heads=2, positions_T=positions[:2], head_norms=norms
    )
    assert torch.equal(q[:2], expected)
    assert torch.equal(cache.view(torch.uint8), alone_cache.view(torch.uint8))


def test_what_does_not_fit_is_refused() -> None:
    qkv, cache, (_, _, table) = _qkv(2, 1, 64, torch.bfloat16), _cache(torch.bfloat16, 1, 64), _turns(32)
    with pytest.raises(ValueError, match=r"3 \+ 2 \* 1 heads of 64 are 320 columns"):
        rope_cache_write(qkv, table, cache, SLOTS, num_heads=3)
    with pytest.raises(ValueError, match="3 slots for 4 tokens"):
        rope_cache_write(qkv, table, cache, SLOTS[:3], num_heads=2)
    norms = HeadNorms(torch.ones(64, device=DEVICE), torch.ones(32, device=DEVICE), EPS)
    with pytest.raises(ValueError, match="head norms of shapes"):
        rope_cache_write(qkv, table, cache, SLOTS, num_heads=2, head_norms=norms)
