"""Attention over packed sequences on a CPU, in C++ and in PyTorch. (On a GPU: test_packed_triton.py.)"""

from itertools import pairwise

import pytest
import torch

from kernels.attention.packed import PackedAttention
from kernels.attention.packed.reference import packed_attention
from tests.support.kernels.kernel_paths import KINDS, NATIVE_KINDS, path_of

# A token alone, a window, more than a tile of 128 queries and a chunk of 64 keys, whole chunks.
STARTS = (0, 1, 17, 160, 288)


def _qkv(num_tokens: int, num_heads: int, head_size: int) -> tuple[torch.Tensor, ...]:
    """Columns of one projection."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_tokens, 3, num_heads, head_size, generator=generator).unbind(1)


@pytest.mark.parametrize(("num_heads", "head_size"), [(3, 80), (2, 72), (1, 16), (2, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_reference(kind: str, num_heads: int, head_size: int) -> None:
    """float32 sums of a few hundred products of size 1."""
    q, k, v = _qkv(STARTS[-1], num_heads, head_size)
    out = torch.full((STARTS[-1], num_heads, head_size), float("nan"))
    attention = PackedAttention(STARTS, path_of(kind, torch.float32))
    scale = head_size**-0.5
    assert attention(q, k, v, scale, out=out) is out
    assert (out - packed_attention(q, k, v, STARTS, scale)).abs().max() < 2e-6


@pytest.mark.parametrize("kind", NATIVE_KINDS)
def test_a_sequence_has_the_same_bits_wherever_it_is(kind: str) -> None:
    q, k, v = _qkv(STARTS[-1], 2, 24)
    backend = path_of(kind, torch.float32)
    packed = PackedAttention(STARTS, backend)(q, k, v, 0.3)
    for first, end in pairwise(STARTS):
        alone = PackedAttention((0, end - first), backend)(q[first:end], k[first:end], v[first:end], 0.3)
        assert torch.equal(alone, packed[first:end])


@pytest.mark.parametrize("kind", KINDS)
def test_large_scores(kind: str) -> None:
    """Weights that underflow, and a maximum that grows from chunk to chunk."""
    q, k, v = _qkv(200, 1, 16)
    k = k * torch.linspace(0.1, 300, 200)[:, None, None]
    attention = PackedAttention((0, 200), path_of(kind, torch.float32))
    got = attention(q.contiguous(), k.contiguous(), v.contiguous(), 1.0)
    assert (got - packed_attention(q, k, v, (0, 200), 1.0)).abs().max() < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_nothing(kind: str) -> None:
    q, k, v = _qkv(0, 2, 16)
    assert PackedAttention((0,), path_of(kind, torch.float32))(q, k, v, 1.0).shape == (0, 2, 16)


@pytest.mark.parametrize("starts", [(1, 5), (0, 5, 5), (0, 5, 3), ()])
def test_starts_that_do_not_rise_are_refused(starts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must begin with 0 and rise"):
        PackedAttention(starts, path_of("torch", torch.float32))


def test_tensors_that_do_not_fit_are_refused() -> None:
    attention = PackedAttention((0, 5), path_of("torch", torch.float32))
    q, k, v = _qkv(5, 2, 16)
    with pytest.raises(ValueError, match=r"k has shape \(4, 2, 16\)"):
        attention(q, k[:4], v, 1.0)
    with pytest.raises(ValueError, match="heads must be side by side"):
        attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, 1.0)
