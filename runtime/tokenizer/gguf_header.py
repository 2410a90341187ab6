"""Reads the header of a GGUF file: its metadata, and the places of its tensors.

Workers and plans read it here, and a file whose tokenizer the gguf library reads is checked here before: that library
believes every length.

gguf.GGUFReader makes several numpy objects for each of the tokenizer's strings, which no worker needs: 3.0 s of a core
for a vocabulary of 49,152, against 0.04 s here. This reader also trusts nothing: it checks every length against the
file's size before use.
Format: ggml-org/ggml, docs/gguf.md.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType

VERSIONS = (2, 3)
# Longer arrays belong to the tokenizer: only their length is kept, as a range.
LONGEST_ARRAY = 256
MAX_DIMS = 4
ALIGNMENT = "general.alignment"

_FORMATS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


class HeaderError(ValueError):
    """The file is not GGUF, or is damaged or cut short. The message names it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor in its file. shape: the contiguous dim last."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    # Key -> number, string, list, or a range in place of an array longer than LONGEST_ARRAY.
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def check_file(path: Path) -> None:
    """Raises HeaderError unless the header of a file can be read."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            read_header(path, data)
    except HeaderError:
        raise
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise HeaderError(f"{path}: cannot be read: {error}") from None


def read_header(path: Path, data: mmap.mmap) -> GGUFHeader:
    """Reads the header. Raises HeaderError, also for keys and tensors that are there twice, of which readers would take
    different ones, and for tensors that share bytes."""
    cursor = _Cursor(path, data)
    magic, version = cursor.number("<I"), cursor.number("<I")
    if magic != GGUF_MAGIC:
        raise HeaderError(f"{path}: not a GGUF file")
    if version not in VERSIONS:
        raise HeaderError(f"{path}: GGUF version {version} is not supported; 2 and 3, little-endian, are")
    num_tensors, num_keys = cursor.count("<Q"), cursor.count("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text()
        if key in metadata:
            raise HeaderError(f"{path}: damaged: it has the key {key!r:.100} twice")
        kind = cursor.value_type()
        if key == ALIGNMENT and kind is not GGUFValueType.UINT32:
            raise HeaderError(f"{path}: damaged: {ALIGNMENT} has the type {kind.name}; UINT32 is expected")
        metadata[key] = cursor.value(kind)
    placed: dict[str, StoredTensor] = {}
    for _ in range(num_tensors):
        name, tensor = cursor.tensor()
        if name in placed:
            raise HeaderError(f"{path}: damaged: it has the tensor {name!r:.100} twice")
        placed[name] = tensor
    alignment = metadata.get(ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
    if alignment < 1 or alignment & (alignment - 1):
        raise HeaderError(f"{path}: damaged: {ALIGNMENT} is {alignment}; a power of two is expected")
    start = -(-cursor.position // alignment) * alignment
    _check_places(path, placed, alignment, len(data) - start)
    return GGUFHeader(
        metadata,
        {
            name: StoredTensor(tensor.kind, tensor.shape, start + tensor.offset, tensor.num_bytes)
            for name, tensor in placed.items()
        },
    )


def _check_places(path: Path, placed: Mapping[str, StoredTensor], alignment: int, num_bytes: int) -> None:
    """placed: offsets count from the end of the header, behind which num_bytes follow. Raises HeaderError."""
    end, before = 0, ""
    for name, tensor in sorted(placed.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if tensor.offset % alignment:
            raise HeaderError(
                f"{path}: damaged: {name} begins at {tensor.offset:,} of the data, not a multiple of {alignment}"
            )
        if tensor.offset < end:
            raise HeaderError(f"{path}: damaged: {name} begins at {tensor.offset:,} of the data, within {before}")
        end, before = tensor.offset + tensor.num_bytes, name
        if end > num_bytes:
            raise HeaderError(
                f"{path}: cut short: {name} ends at byte {end:,} of the data, the file at {max(num_bytes, 0):,}; get "
                "the file again"
            )


class _Cursor:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self.position = 0

    def skip(self, num_bytes: int) -> int:
        """Moves on; returns the old position."""
        start, self.position = self.position, self.position + num_bytes
        if self.position > len(self._data):
            raise HeaderError(f"{self._path}: cut short or damaged: its header exceeds its {len(self._data):,} bytes")
        return start

    def number(self, number_format: str) -> Any:
        start = self.skip(struct.calcsize(number_format))
        return struct.unpack_from(number_format, self._data, start)[0]

    def count(self, number_format: str) -> int:
        """Reads the number of entries that take at least a byte each."""
        count = self.number(number_format)
        if count > len(self._data):
            raise HeaderError(f"{self._path}: damaged: it claims {count:,} entries in {len(self._data):,} bytes")
        return count

    def text(self) -> str:
        length = self.number("<Q")
        start = self.skip(length)
        try:
            return self._data[start : self.position].decode()
        except UnicodeDecodeError:
            raise HeaderError(f"{self._path}: damaged: the name at byte {start:,} is not UTF-8") from None

    def value_type(self) -> GGUFValueType:
        code = self.number("<I")
        try:
            return GGUFValueType(code)
        except ValueError:
            raise HeaderError(f"{self._path}: damaged: unknown value type {code}") from None

    def value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self.text()
        if kind is not GGUFValueType.ARRAY:
            return self.number(_FORMATS[kind])
        item_kind, count = self.value_type(), self.count("<Q")
        if item_kind is GGUFValueType.ARRAY:
            raise HeaderError(f"{self._path}: damaged: an array of arrays")
        if count <= LONGEST_ARRAY:
            return [self.value(item_kind) for _ in range(count)]
        if item_kind is GGUFValueType.STRING:
            for _ in range(count):
                self.skip(self.number("<Q"))
        else:
            self.skip(count * struct.calcsize(_FORMATS[item_kind]))
        return range(count)

    def tensor(self) -> tuple[str, StoredTensor]:
        """Reads an entry of the tensor table; its offset counts from the end of the header."""
        name = self.text()
        num_dims = self.number("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise HeaderError(f"{self._path}: damaged: {name} has {num_dims} dims")
        shape = tuple(self.number("<Q") for _ in range(num_dims))[::-1]
        code, offset = self.number("<I"), self.number("<Q")
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise HeaderError(f"{self._path}: {name} has the unknown quantization {code}") from None
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_values:
            raise HeaderError(
                f"{self._path}: damaged: {name} has rows of {shape[-1]}, not a multiple of {block_values}"
            )
        return name, StoredTensor(kind, shape, offset, prod(shape) // block_values * block_bytes)
