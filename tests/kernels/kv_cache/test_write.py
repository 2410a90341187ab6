import pytest
import torch

from kernels.elementwise.rope import cos_sin_table
from kernels.kv_cache.layout import KVScales
from kernels.kv_cache.write import RopeCacheWrite
from kernels.kv_cache.write.reference import rope_cache_write
from tests.support.kernels.kernel_paths import KINDS, NATIVE_KINDS, path_of

HEADS, KV_HEADS, SIZE = 5, 2, 24
POSITIONS = torch.tensor([0, 3, 17, 200])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_norm", [False, True])
def test_q_is_that_of_the_reference(kind: str, with_norm: bool) -> None:
    torch.manual_seed(0)
    head_norm = torch.randn(HEADS + KV_HEADS, SIZE) if with_norm else None
    op = RopeCacheWrite(
        path_of(kind, torch.float32),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=SIZE,
        head_norm_HD=head_norm,
        eps=1e-2,
    )
    qkv = torch.randn(4, (HEADS + 2 * KV_HEADS) * SIZE)
    cos_sin = cos_sin_table(POSITIONS, 1.0 / 100.0 ** (torch.arange(SIZE // 2) / 12), 1.1)
    expected, _, _ = rope_cache_write(qkv, cos_sin, HEADS, KV_HEADS, SIZE, head_norm, 1e-2)
    q = op(qkv, cos_sin, torch.zeros(3, 8, 2, KV_HEADS, SIZE), torch.tensor([8, 9, 23, 15]))
    torch.testing.assert_close(q.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_native_cache_has_every_number_once_in_its_place(dtype: torch.dtype, block_size: int) -> None:
    """The layout of cache_layout.h: keys in columns of tokens, values in rows; but in float32, pairs along the summed
    axis.

    Slots that are not written stay as they were.
    """
    torch.manual_seed(0)
    op = RopeCacheWrite(path_of("native", dtype), num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE)
    num_tokens = 3 * block_size
    qkv = torch.randn(num_tokens - 1, (HEADS + 2 * KV_HEADS) * SIZE)
    slots = torch.randperm(num_tokens)[1:] + block_size
    cache = torch.full((4, block_size, 2, KV_HEADS, SIZE), 7.0, dtype=dtype)
    no_turn = torch.ones(len(slots), 1, SIZE // 2, dtype=torch.complex64)
    kv_T2KD = qkv[:, HEADS * SIZE :].unflatten(1, (2, KV_HEADS, SIZE)).to(dtype).clone()
    plain = torch.full((4 * block_size, 2, KV_HEADS, SIZE), 7.0, dtype=dtype)
    plain[slots] = kv_T2KD
    op(qkv, no_turn, cache, slots)
    k_NKDB = plain[:, 0].unflatten(0, (4, block_size)).permute(0, 2, 3, 1)
    v_NKBD = plain[:, 1].unflatten(0, (4, block_size)).permute(0, 2, 1, 3)
    if dtype is not torch.float32:
        k_NKDB = k_NKDB.unflatten(2, (-1, 2)).transpose(3, 4)
        v_NKBD = v_NKBD.unflatten(2, (-1, 2)).transpose(3, 4)
    expected = torch.stack((k_NKDB.flatten(2), v_NKBD.flatten(2)), dim=2)
    assert torch.equal(cache.flatten(), expected.flatten())


@pytest.mark.parametrize("kind", NATIVE_KINDS)
@pytest.mark.parametrize("has_scales", [False, True])
def test_e4m3_is_rounded_as_pytorch_rounds_it_and_ends_at_448(has_scales: bool, kind: str) -> None:
    """All numbers of bfloat16 and float16, among them all that lie between two of e4m3."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    numbers = torch.cat([bits.view(dtype).float() for dtype in (torch.bfloat16, torch.float16)])
    numbers[numbers.isinf()] = torch.nan  # as rope makes them
    kv, size = numbers.view(-1, 16), 8
    scales = KVScales(torch.tensor([0.37]), torch.tensor([5.3]))
    op = RopeCacheWrite(
        path_of(kind, torch.float8_e4m3fn),
        num_heads=1,
        num_kv_heads=1,
        head_size=size,
        kv_scales=scales if has_scales else None,
    )
    cache = torch.zeros(len(kv) // 8, 8, 2, 1, size, dtype=torch.float8_e4m3fn)
    op(
        torch.cat((torch.zeros(len(kv), size), kv), dim=1),
        torch.ones(len(kv), 1, size // 2, dtype=torch.complex64),
        cache,
        torch.arange(len(kv)),
    )
    keys, values = cache.float().view(len(kv) // 8, 2, 8 * size).unbind(1)
    got = torch.cat(
        (
            keys.unflatten(1, (size // 2, 8, 2)).transpose(1, 2).reshape(len(kv), size),
            values.unflatten(1, (4, size, 2)).transpose(2, 3).reshape(len(kv), size),
        ),
        dim=1,
    )
    if has_scales:
        kv = torch.cat((kv[:, :size] / scales.k, kv[:, size:] / scales.v), dim=1)
    expected = kv.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
