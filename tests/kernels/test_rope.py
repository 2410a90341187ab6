import pytest
import torch

from kernels.rope import apply_rope_, interleave_rope_pairs, rope_turns
from kernels.rope.reference import rope

POSITIONS = torch.tensor([0, 1, 17, 4095])
FREQUENCIES = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)


def _interleaved(heads_THD: torch.Tensor) -> torch.Tensor:
    return torch.stack([interleave_rope_pairs(head.flatten(), 16).view_as(head) for head in heads_THD])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-4), (torch.bfloat16, 2e-2)])
def test_turning_reordered_heads_is_rope_reordered(dtype: torch.dtype, tolerance: float) -> None:
    """At position 4095 a float32 angle is off by up to 4095 * 2^-24 = 2.4e-4; bf16 rounds results up to 4 by 2^-7."""
    torch.manual_seed(0)
    wide = torch.randn(4, 70).to(dtype)
    heads = wide[:, :48].unflatten(1, (3, 16))  # strided, as q and k lie beside v
    expected = _interleaved(rope(heads, POSITIONS, FREQUENCIES, 1.3))
    rest = wide[:, 48:].clone()
    heads.copy_(_interleaved(heads.clone()))
    apply_rope_(heads, rope_turns(POSITIONS, FREQUENCIES, 1.3))
    torch.testing.assert_close(heads.double(), expected, rtol=0, atol=tolerance)
    assert torch.equal(wide[:, 48:], rest)


def test_interleaving_moves_whole_rows_within_heads() -> None:
    assert interleave_rope_pairs(torch.arange(8), 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
