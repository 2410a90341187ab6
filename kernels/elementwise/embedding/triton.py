"""Embedding gather on a GPU.

Legend: T tokens, V rows of the table, N numbers of a row.
"""

import torch
import triton.language as tl

from kernels.triton_common.integers import cdiv, next_power_of_2
from kernels.triton_common.jit import jit
from kernels.triton_common.numbers import widen

# Numbers of a row that a program copies: with 4 warps, one 16-byte vector of 16-bit numbers a thread. A decode step of
# a few tokens then still spreads over several SMs.
_TILE = 1024
_NUM_WARPS = 4


def embedding(
    ids_T: torch.Tensor, table_VN: torch.Tensor, *, first_id: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, N] in out's dtype: row t is table_VN[ids_T[t] - first_id], or zeros if the table has no such row.

    A tensor-parallel rank's table holds only ids first_id to first_id + V - 1, and the sum over ranks is the embedding;
    a negative id (padding) gives zeros too. ids_T: int32 or int64. table_VN: contiguous rows. out: memory for the
    result, contiguous rows, in the table's dtype or float32, which holds bf16 and fp16 exactly; None: new memory in the
    table's dtype. Raises ValueError for an `out` of another shape or dtype.
    """
    num_tokens, size = len(ids_T), table_VN.shape[1]
    if out is None:
        out = torch.empty(num_tokens, size, dtype=table_VN.dtype, device=table_VN.device)
    elif out.shape != (num_tokens, size) or out.dtype not in (table_VN.dtype, torch.float32):
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype}; ({num_tokens}, {size}) {table_VN.dtype} or float32 is expected "
            "for these ids"
        )
    assert table_VN.stride(1) == out.stride(1) == ids_T.stride(0) == 1
    if num_tokens:
        tile = min(_TILE, next_power_of_2(size))
        _embedding_kernel[(num_tokens, cdiv(size, tile))](
            ids_T,
            table_VN,
            out,
            first_id,
            len(table_VN),
            table_VN.stride(0),
            out.stride(0),
            SIZE=size,
            TILE=tile,
            num_warps=_NUM_WARPS,
        )
    return out


@jit
def _embedding_kernel(
    ids_T,
    table_VN,
    out_TN,
    first_id,
    num_rows,
    table_stride,
    out_stride,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    # A tensor of one number, not a scalar: when the interpreter broadcasts a scalar's comparison, it becomes an
    # integer.
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    numbers = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.load(ids_T + token).to(tl.int64) - first_id
    inside = (row >= 0) & (row < num_rows)
    x = tl.load(table_VN + row * table_stride + numbers, mask=(numbers < SIZE) & inside, other=0.0)
    if out_TN.dtype != table_VN.dtype:
        x = widen(x)
    tl.store(out_TN + token * out_stride + numbers, x, mask=numbers < SIZE)
