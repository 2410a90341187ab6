"""The GPU's block copy: all layers, its blocks and no other."""

import pytest
import torch

from kernels.block_copy.gpu import BlockCopy
from tests.support.gpu import DEVICE


def _layers(num_layers: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for _ in range(num_layers)]


@pytest.mark.parametrize(
    ("dtype", "block"),
    [
        (torch.bfloat16, (2, 2, 8, 64)),
        (torch.float8_e4m3fn, (2, 3, 16, 96)),  # words that are no multiple of a tile
        (torch.float32, (2, 1, 1, 5)),  # less than a tile, and no multiple of 16 bytes
    ],
)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_copies_its_blocks_and_no_other(dtype: torch.dtype, block: tuple[int, ...], id_dtype: torch.dtype) -> None:
    """One block may go to two places; a negative block on either side is padding."""
    layers = _layers(3, (7, *block), dtype)
    expected = [layer.clone() for layer in layers]
    for layer in expected:
        for source, target in ((6, 0), (2, 4), (6, 3)):
            layer[target] = layer[source]
    pairs = torch.tensor([[6, 0], [2, 4], [-1, 1], [5, -1], [6, 3]], dtype=id_dtype, device=DEVICE)
    BlockCopy(layers)(pairs)
    for layer, other in zip(layers, expected, strict=True):
        assert torch.equal(layer.view(torch.uint8), other.view(torch.uint8))


def test_layers_that_differ_are_refused() -> None:
    a, b = _layers(2, (4, 2, 8), torch.bfloat16)
    with pytest.raises(ValueError, match="layer 1 is"):
        BlockCopy([a, b.float()])
    with pytest.raises(ValueError, match="layer 0 has to be contiguous"):
        BlockCopy([a.transpose(0, 1), b.transpose(0, 1)])
    with pytest.raises(ValueError, match="a block has 3 bytes"):
        BlockCopy(_layers(1, (4, 3), torch.float8_e4m3fn))
