"""Reads and converts a matrix some rows at a time, so that only the result is ever in memory as a whole.

Legend: O outputs, I inputs.
"""

from collections.abc import Callable, Iterator
from math import prod

import torch

from kernels.linear.weights import BLOCK, Int4Weight, Int8Weight, Weight, map_tensors, slice_inputs, slice_outputs
from kernels.native.memory import passing_memory
from runtime.free_memory import give_back_free_memory
from worker.weights.reader import Shape

# Numbers in a piece: conversion makes several float32 copies of it, which fit into a core's cache.
_NUM_ELEMENTS = 2**18


def row_ranges(rows: slice, num_columns: int) -> Iterator[slice]:
    """Splits rows of a matrix into pieces, which begin at multiples of a block from the first row on."""
    step = max(1, _NUM_ELEMENTS // max(1, num_columns) // BLOCK) * BLOCK
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(start + step, rows.stop))


def converted(shape: Shape, dtype: torch.dtype, read: Callable[[slice], torch.Tensor], rows: slice) -> torch.Tensor:
    """Returns `rows` of a tensor of `shape`, in dtype. read: returns some of them."""
    out = passing_memory((rows.stop - rows.start, *shape[1:]), dtype)
    for piece in row_ranges(rows, prod(shape[1:])):
        out[piece.start - rows.start : piece.stop - rows.start] = read(piece)
    return out


def in_pieces(read: Callable[[slice], Weight], rows: slice, num_inputs: int, inputs: slice | None) -> Weight | None:
    """Returns `rows` of a weight, limited to `inputs` unless that is None; or None if pieces are of different kinds.
    read: returns some rows, with all inputs."""
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
        # The pieces' copies have left free memory all over the heap.
        give_back_free_memory()
    return whole


def columns_of(matrix: torch.Tensor, columns: slice) -> torch.Tensor:
    """Returns a copy of some columns, on the same device."""
    if matrix.device.type != "cpu":
        return matrix[:, columns].contiguous()
    return passing_memory((len(matrix), columns.stop - columns.start), matrix.dtype).copy_(matrix[:, columns])


def part_of(weight: Weight, rows: slice | None, inputs: slice | None) -> Weight:
    """Returns a part of a weight. Raises ValueError if it would split groups or blocks."""
    if rows is not None:
        weight = slice_outputs(weight, rows)
    return weight if inputs is None else slice_inputs(weight, inputs)


def _like(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    return passing_memory((rows.stop - rows.start, *tensor.shape[1:]), tensor.dtype)


def _put(part: Weight, whole: Weight, rows: slice) -> bool:
    """Copies part into rows of whole. Returns False if they are of different kinds."""
    match whole, part:
        case torch.Tensor(), torch.Tensor():
            whole[rows] = part
        case Int8Weight(), Int8Weight() if whole.is_grouped == part.is_grouped:
            whole.values_OI[rows], whole.scales_OG[rows] = part.values_OI, part.scales_OG
        case Int4Weight(), Int4Weight() if whole.has_zeros == part.has_zeros:
            whole.values_OI[rows] = part.values_OI
            whole.scales_OG[rows], whole.minima_OG[rows] = part.scales_OG, part.minima_OG
        case _:
            return False
    return True
