"""The GPU's rope, in both orders of pairs, whole heads and parts, against float64."""

import pytest
import torch

from kernels.elementwise.rope import reference
from kernels.elementwise.rope.triton import cos_sin_rows, rope_
from tests.support.gpu.gpu import DEVICE
from tests.support.kernels.rounding import assert_rounded

MAGNITUDE = 1.3


def _frequencies(num_pairs: int) -> torch.Tensor:
    return (1.0 / 10000.0 ** (torch.arange(num_pairs) / num_pairs)).to(DEVICE)


def _table(num_rows: int, num_pairs: int) -> torch.Tensor:
    """float64 cosines and sines, rounded once, so that any error left is the kernel's own."""
    angles = torch.arange(num_rows).double()[:, None] * _frequencies(num_pairs).cpu().double()
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * MAGNITUDE).float().to(DEVICE)


def _heads(num_tokens: int, num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> torch.Tensor:
    """q, k and v side by side."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_size, generator=generator).to(dtype).to(DEVICE)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "num_pairs"),
    [(1, 1, 64, 32), (9, 3, 80, 20), (5, 5, 96, 48), (33, 2, 128, 64), (2, 1, 256, 1)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_agrees_with_float64(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_size: int, num_pairs: int, interleaved: bool
) -> None:
    """q and k turn, the rest of their heads and v do not; positions in no order, one twice."""
    heads = _heads(4, num_heads, num_kv_heads, head_size, dtype)
    before, positions = heads.cpu(), torch.tensor([17, 0, 40, 17], device=DEVICE)
    qk = slice(0, num_heads + num_kv_heads)
    expected = reference.rope(
        before[:, qk], positions.cpu(), _frequencies(num_pairs).cpu(), MAGNITUDE, interleaved=interleaved
    )
    q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    rope_(q, k, _table(41, num_pairs), positions_T=positions, interleaved=interleaved)
    # Two products and their sum, of a table rounded to float32, of numbers up to 4 times a row's largest.
    assert_rounded(heads[:, qk], expected, error=1e-6)
    assert torch.equal(heads[:, qk, 2 * num_pairs :].cpu(), before[:, qk, 2 * num_pairs :])
    assert torch.equal(heads[:, qk.stop :].cpu(), before[:, qk.stop :])


def test_without_positions_a_row_is_a_token() -> None:
    table = _table(3, 32)
    one, other = (_heads(3, 2, 1, 64, torch.bfloat16) for _ in range(2))
    rope_(one[:, :2], one[:, 2:3], table)
    rope_(other[:, :2], other[:, 2:3], table, positions_T=torch.arange(3, dtype=torch.int32, device=DEVICE))
    assert torch.equal(one, other)
    assert not torch.equal(one, _heads(3, 2, 1, 64, torch.bfloat16))


@pytest.mark.parametrize(("num_pairs", "dtype"), [(1, torch.int64), (40, torch.int32), (64, torch.int32)])
def test_rows_of_a_step_agree_with_float64(num_pairs: int, dtype: torch.dtype) -> None:
    """A float32 angle is off by half its last place, 2^-5 at a million; up to there range reduction must hold."""
    positions = torch.tensor([0, 1, 4095, 131071, 1048575, *range(19)], dtype=dtype, device=DEVICE)
    frequencies = _frequencies(num_pairs)
    out = torch.full((24, 2 * num_pairs), float("nan"), device=DEVICE)
    assert cos_sin_rows(positions, frequencies, MAGNITUDE, out=out) is out
    angles = (positions.float()[:, None] * frequencies).cpu()
    exact = torch.cat((angles.double().cos(), angles.double().sin()), dim=1) * MAGNITUDE
    torch.testing.assert_close(out.cpu().double(), exact, rtol=0, atol=5e-7)


def test_a_token_does_not_depend_on_its_batch() -> None:
    table, positions = _table(41, 32), torch.tensor([17, 0, 40], device=DEVICE)
    batch, alone = (_heads(3, 9, 3, 64, torch.bfloat16) for _ in range(2))
    rope_(batch[:, :9], batch[:, 9:12], table, positions_T=positions)
    for token in range(3):
        one = alone[token : token + 1]
        rope_(one[:, :9], one[:, 9:12], table, positions_T=positions[token : token + 1])
    assert torch.equal(batch, alone)


def test_what_does_not_fit_is_refused() -> None:
    heads = _heads(3, 2, 1, 64, torch.bfloat16)
    q, k = heads[:, :2], heads[:, 2:3]
    with pytest.raises(ValueError, match="2 to 64, the head size"):
        rope_(q, k, _table(3, 33))
    with pytest.raises(ValueError, match="2 rows for 3 tokens"):
        rope_(q, k, _table(2, 32))
    with pytest.raises(ValueError, match="positions of shape"):
        rope_(q, k, _table(2, 32), positions_T=torch.zeros(2, dtype=torch.int64, device=DEVICE))
    with pytest.raises(ValueError, match="tokens and head size have to be the same"):
        rope_(q, k[:2], _table(3, 32))
