"""The GPU's embedding gather, whole and as tensor-parallel parts."""

import pytest
import torch

from kernels.elementwise.embedding import reference
from kernels.elementwise.embedding.triton import embedding
from tests.support.gpu.gpu import DEVICE


def _table(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A part of a larger table whose other rows and columns are NaN, so that reading outside the part shows."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.full((num_rows + 2, size + 16), float("nan"))
    wide[1:-1, :size] = torch.randn(num_rows, size, generator=generator)
    return wide.to(dtype).to(DEVICE)[1:-1, :size]


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [1, 576, 2880])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gathers_its_rows_and_zeros(dtype: torch.dtype, size: int, id_dtype: torch.dtype) -> None:
    """Ids of the first and the last row, ids just outside, and -1 for padding."""
    table = _table(7, size, dtype)
    ids = torch.tensor([30, 36, 29, 37, -1, 33, 30], dtype=id_dtype, device=DEVICE)
    out = torch.full((7, size), float("nan"), dtype=dtype, device=DEVICE)
    assert embedding(ids, table, first_id=30, out=out) is out
    assert torch.equal(out.cpu(), reference.embedding(ids.cpu(), table.cpu(), 30))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widens_into_a_float32_stream(dtype: torch.dtype) -> None:
    table = _table(7, 576, dtype)
    ids = torch.tensor([30, 36, -1, 37, 33], dtype=torch.int32, device=DEVICE)
    stream = torch.full((5, 592), float("nan"), device=DEVICE)
    embedding(ids, table, first_id=30, out=stream[:, :576])
    assert torch.equal(stream[:, :576], embedding(ids, table, first_id=30).float())
    assert stream[:, 576:].isnan().all()


def test_parts_of_ranks_add_up_to_the_whole() -> None:
    table = _table(10, 300, torch.bfloat16)
    ids = torch.tensor([9, 0, 4, 5, 5], device=DEVICE)
    parts = embedding(ids, table[:5]) + embedding(ids, table[5:], first_id=5)
    assert torch.equal(parts, table[ids])


def test_no_tokens_are_fine_and_another_dtype_is_refused() -> None:
    table = _table(3, 8, torch.bfloat16)
    assert embedding(torch.empty(0, dtype=torch.int64, device=DEVICE), table).shape == (0, 8)
    with pytest.raises(ValueError, match=r"\(1, 8\) torch.bfloat16 or float32 is expected"):
        embedding(torch.tensor([0], device=DEVICE), table, out=torch.empty(1, 8, dtype=torch.float16, device=DEVICE))
