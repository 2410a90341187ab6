"""Reading and converting a matrix some rows at a time, so that nothing but its result is ever there as a whole.

Legend: O outputs, I inputs.
"""

from collections.abc import Callable, Iterator
from math import prod

import torch

from kernels.linear.weights import BLOCK, Int4Weight, Int8Weight, Weight, map_tensors, slice_inputs, slice_outputs
from kernels.native.memory import give_back_free_memory, passing_memory
from worker.weights.reader import Shape

# Numbers of a piece: converting takes some float32 copies of it, which stay in a core's cache.
_NUM_ELEMENTS = 2**18


def row_ranges(rows: slice, num_columns: int) -> Iterator[slice]:
    """Of so many rows of a matrix. They begin at multiples of a block from the first row on."""
    step = max(1, _NUM_ELEMENTS // max(1, num_columns) // BLOCK) * BLOCK
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(start + step, rows.stop))


def converted(shape: Shape, dtype: torch.dtype, read: Callable[[slice], torch.Tensor], rows: slice) -> torch.Tensor:
    """`rows` of a tensor of `shape`, in dtype; read: gives some of them."""
    out = passing_memory((rows.stop - rows.start, *shape[1:]), dtype)
    for piece in row_ranges(rows, prod(shape[1:])):
        out[piece.start - rows.start : piece.stop - rows.start] = read(piece)
    return out


def in_pieces(read: Callable[[slice], Weight], rows: slice, num_inputs: int, inputs: slice | None) -> Weight | None:
    """`rows` of a weight, of these only the `inputs`, unless that is None. read: gives some rows, with all inputs.
    None: they are of different kinds."""
    whole: Weight | None = None
    for piece in row_ranges(rows, num_inputs):
        part = read(piece)
        if inputs is not None:
            part = slice_inputs(part, inputs)
        if whole is None:
            whole = map_tensors(part, lambda tensor: _like(tensor, rows))
        if not _put(part, whole, slice(piece.start - rows.start, piece.stop - rows.start)):
            return None
    if (rows.stop - rows.start) * num_inputs >= _NUM_ELEMENTS:
        # Of the pieces' copies, which lay between each other.
        give_back_free_memory()
    return whole


def columns_of(matrix: torch.Tensor, columns: slice) -> torch.Tensor:
    """A copy, on the same device."""
    if matrix.device.type != "cpu":
        return matrix[:, columns].contiguous()
    return passing_memory((len(matrix), columns.stop - columns.start), matrix.dtype).copy_(matrix[:, columns])


def part_of(weight: Weight, rows: slice | None, inputs: slice | None) -> Weight:
    """Raises ValueError for groups or blocks that would be cut."""
    if rows is not None:
        weight = slice_outputs(weight, rows)
    return weight if inputs is None else slice_inputs(weight, inputs)


def _like(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    return passing_memory((rows.stop - rows.start, *tensor.shape[1:]), tensor.dtype)


def _put(part: Weight, whole: Weight, rows: slice) -> bool:
    """False: they are of different kinds."""
    match whole, part:
        case torch.Tensor(), torch.Tensor():
            whole[rows] = part
        case Int8Weight(), Int8Weight() if whole.is_grouped == part.is_grouped:
            whole.values_OI[rows], whole.scales_OG[rows] = part.values_OI, part.scales_OG
        case Int4Weight(), Int4Weight():
            whole.values_OI[rows] = part.values_OI
            whole.scales_OG[rows], whole.minima_OG[rows] = part.scales_OG, part.minima_OG
        case _:
            return False
    return True
