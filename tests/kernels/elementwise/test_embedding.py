import pytest
import torch

from kernels.elementwise.embedding.torch_cpu import embedding
from tests.support.kernels.kernel_paths import KINDS, path_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_come_in_order_and_exact(kind: str, dtype: torch.dtype) -> None:
    """A width that is no multiple of a vector, the same token twice, and more tokens than one task takes."""
    table = torch.randn(50, 37, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = torch.tensor([49, 0, 7, 7, *range(40)])
    out = torch.empty(len(ids), 37)
    got = embedding(ids, table, path_of(kind, dtype).native, out=out)
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(got, table.float()[ids])


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_multiplies_what_is_widened(kind: str) -> None:
    """The product is float32; rounding it to bfloat16 would change it."""
    table = torch.randn(9, 37, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([8, 0, 3])
    got = embedding(ids, table, path_of(kind, torch.bfloat16).native, out=torch.empty(3, 37), scale=25.25)
    assert torch.equal(got, table.float()[ids] * 25.25)
