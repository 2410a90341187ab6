import pytest
import torch

from kernels.elementwise.rope import CosSinTable, apply_rope_, cos_sin_table, interleave_rope_pairs
from kernels.elementwise.rope.reference import rope
from tests.support.kernels.kernel_paths import KINDS, path_of

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
    apply_rope_(heads, cos_sin_table(POSITIONS, FREQUENCIES, 1.3))
    torch.testing.assert_close(heads.double(), expected, rtol=0, atol=tolerance)
    assert torch.equal(wide[:, 48:], rest)


def test_interleaving_moves_whole_rows_within_heads() -> None:
    assert interleave_rope_pairs(torch.arange(8), 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_turns_are_cosines_and_sines_of_float32_angles(kind: str) -> None:
    positions, magnitude = torch.tensor([0, 1, 17, 4095, 1_000_000, 2**24 + 1] * 7), 1.25
    angles = (positions.float()[:, None] * FREQUENCIES).double()
    cos_sin = CosSinTable(path_of(kind, torch.float32), FREQUENCIES, magnitude)
    got = cos_sin(positions, torch.empty(len(positions), 1, len(FREQUENCIES), dtype=torch.complex64))
    expected = torch.complex(angles.cos(), angles.sin())[:, None] * magnitude
    assert float((got - expected).abs().max()) < 2e-7 * magnitude
    # A token's turn has the same bits wherever in a step it stands.
    for index in range(6):
        alone = cos_sin(positions[index : index + 1], torch.empty(1, 1, len(FREQUENCIES), dtype=torch.complex64))
        assert all(torch.equal(got[place : place + 1], alone) for place in range(index, len(positions), 6))
