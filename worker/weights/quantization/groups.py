"""Weights of integers in groups of inputs, each with a scale and a zero point: weight = scale * (integer - zero).

Legend: O outputs, I inputs, G groups of the checkpoint, B blocks of 32 inputs, as kernels take them.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection

import torch

from kernels.linear.weights import GROUP, Int4Weight, Int8Weight, num_groups
from worker.weights.quantization.layers import one_of
from worker.weights.quantization.scaled import check_finite
from worker.weights.reader import Shape, WeightsError
from worker.weights.safetensors_files import SafetensorsFiles

BITS = (4, 8)


def check_integers(bits: int, group_size: int) -> None:
    """Raises ValueError, naming the field, for bits or group sizes that are not supported; -1: one group of all
    inputs."""
    if bits not in BITS:
        raise ValueError(f"{bits} bits are not supported; {' and '.join(map(str, BITS))} are")
    if group_size != -1 and (group_size < 8 or group_size % 8):
        raise ValueError(f"group_size={group_size} is not supported; multiples of 8 are, and -1 for all inputs")


def unpacked(packed: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Returns the unsigned integers in int32 words along `dim` (0 or 1), as uint8: the first in the lowest bits. order:
    the place of each integer in its word."""
    per_word = 32 // bits
    places = torch.tensor(order or range(per_word), dtype=torch.int32) * bits
    shifted = (packed.unsqueeze(dim + 1) >> places.view(-1, *(1 for _ in packed.shape[dim + 1 :]))) & (2**bits - 1)
    return shifted.to(torch.uint8).flatten(dim, dim + 1)


def words(part: slice, bits: int) -> tuple[slice, slice]:
    """Returns the words that hold a part of packed integers, and the place of the part in them."""
    per_word = 32 // bits
    first, last = part.start // per_word, -(-part.stop // per_word)
    start = part.start - first * per_word
    return slice(first, last), slice(start, start + part.stop - part.start)


def grouped_floats(
    values_OI: torch.Tensor, scales_OG: torch.Tensor, zeros_OG: torch.Tensor, groups_I: torch.Tensor
) -> torch.Tensor:
    """Returns float32 [O, I]. values_OI: uint8. zeros_OG: int16; [O, 1] for all groups. groups_I: the group of each
    input."""
    scales_OI = scales_OG.float() if scales_OG.shape[1] == 1 else scales_OG.float()[:, groups_I]
    zeros_OI = zeros_OG if zeros_OG.shape[1] == 1 else zeros_OG[:, groups_I]
    return (values_OI.to(torch.int16) - zeros_OI).float().mul_(scales_OI)


def grouped_weight(
    values_OI: torch.Tensor, scales_OG: torch.Tensor, zeros_OG: torch.Tensor, bits: int, group_size: int
) -> Int4Weight | Int8Weight | None:
    """Returns the same weight for kernels, bit by bit, or None if blocks of 32 cannot express it: for other group
    sizes, scales that are not float16, or 8-bit integers that are not within -128 to 127 of their zero point."""
    num_inputs = values_OI.shape[1]
    whole = scales_OG.shape[1] == 1
    if not whole and group_size % GROUP:
        return None
    halves_OG = scales_OG.to(torch.float16)
    is_half = torch.equal(halves_OG.float(), scales_OG.float())
    if bits == 8:
        signed_OI = values_OI.to(torch.int16) - _spread(zeros_OG, group_size, num_inputs)
        if signed_OI.min() < -128 or signed_OI.max() > 127 or not (whole or is_half):
            return None
        scales = scales_OG.float().contiguous() if whole else _in_blocks(halves_OG, group_size, num_inputs)
        return Int8Weight(values_OI=signed_OI.to(torch.int8), scales_OG=scales)
    if not is_half:
        return None
    return Int4Weight(
        values_OI=values_OI.contiguous(),
        scales_OG=_in_blocks(halves_OG, group_size, num_inputs),
        minima_OG=_in_blocks(zeros_OG.to(torch.int8), group_size, num_inputs),
    )


def _in_blocks(numbers_OG: torch.Tensor, group_size: int, num_inputs: int) -> torch.Tensor:
    """Repeats each group's number for its blocks of 32 inputs."""
    if numbers_OG.shape[1] == 1:
        return numbers_OG.expand(-1, num_groups(num_inputs)).contiguous()
    return numbers_OG.repeat_interleave(group_size // GROUP, dim=1)[:, : num_groups(num_inputs)].contiguous()


def _spread(numbers_OG: torch.Tensor, group_size: int, num_inputs: int) -> torch.Tensor:
    if numbers_OG.shape[1] == 1:
        return numbers_OG
    return numbers_OG.repeat_interleave(group_size, dim=1)[:, :num_inputs]


def described(method: str, bits: int, group_size: int, more: str = "") -> str:
    """Describes a layout for the log."""
    groups = "a scale for each output" if group_size == -1 else f"groups of {group_size}"
    return f"{method}, {bits} bits, {groups}{more}"


def check_stored(files: SafetensorsFiles, name: str, dtypes: tuple[str, ...], shape: Shape, why: str) -> None:
    """Raises WeightsError, naming the tensor, unless it has one of these dtypes and this shape. why: what the shape
    follows from."""
    if files.dtypes[name] not in dtypes:
        raise WeightsError(f"{files.path}: {name} is stored as {files.dtypes[name]}; {one_of(dtypes)} is expected")
    if files.shapes[name] != shape:
        raise WeightsError(
            f"{files.path}: {name} has shape {list(files.shapes[name])}; {list(shape)} is expected {why}"
        )


def groups_of_inputs(files: SafetensorsFiles, name: str, group_size: int, num_inputs: int) -> torch.Tensor | None:
    """Reads the group of each input from the tensor `name`; None: groups are adjacent inputs, in order."""
    num_found = -(-num_inputs // group_size) if group_size > 0 else 1
    check_stored(files, name, ("I32", "I64"), (num_inputs,), f"for {num_inputs} inputs")
    groups_I = files.read(name).long()
    if num_found == 1 or (groups_I == -1).any():
        # compressed-tensors fills it with -1 where it is not used.
        return None
    if groups_I.min() < 0 or groups_I.max() >= num_found:
        raise WeightsError(
            f"{files.path}: {name} names groups {int(groups_I.min())} to {int(groups_I.max())}; groups of {group_size} "
            f"of {num_inputs} inputs are 0 to {num_found - 1}"
        )
    return None if torch.equal(groups_I, torch.arange(num_inputs) // group_size) else groups_I


class GroupedLayer(ABC):
    """A StoredLayer of integers in groups of inputs."""

    def __init__(
        self,
        files: SafetensorsFiles,
        shape: Shape,
        tensors: Collection[str],
        scales: str,
        bits: int,
        group_size: int,
        groups_I: torch.Tensor | None = None,
    ) -> None:
        """scales: name of the tensor of scales. groups_I: the group of each input; None: adjacent inputs."""
        self.shape, self.tensors = shape, tensors
        self._files, self._scales, self._bits = files, scales, bits
        self._group_size = shape[1] if group_size == -1 else group_size
        self._groups_I = groups_I

    @abstractmethod
    def _values_OI(self, rows: slice) -> torch.Tensor:
        """Reads integers of some outputs, uint8."""

    @abstractmethod
    def _scales_OG(self, rows: slice) -> torch.Tensor: ...

    @abstractmethod
    def _zeros_OG(self, rows: slice) -> torch.Tensor:
        """Reads zero points of some outputs, int16."""

    def floats(self, rows: slice) -> torch.Tensor:
        groups_I = self._groups_I
        if groups_I is None:
            groups_I = torch.arange(self.shape[1]) // self._group_size
        return grouped_floats(self._values_OI(rows), self._checked_scales_OG(rows), self._zeros_OG(rows), groups_I)

    def weight(self, rows: slice | None) -> Int4Weight | Int8Weight | None:
        if self._groups_I is not None:
            return None
        rows = rows or slice(0, self.shape[0])
        return grouped_weight(
            self._values_OI(rows), self._checked_scales_OG(rows), self._zeros_OG(rows), self._bits, self._group_size
        )

    def _checked_scales_OG(self, rows: slice) -> torch.Tensor:
        scales_OG = self._scales_OG(rows)
        check_finite(self._files, self._scales, scales_OG)
        return scales_OG
