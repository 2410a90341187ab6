"""Tensors in a file that is ours alone: safetensors, with a checksum for each, read straight into given memory.

Written and read here and not by the safetensors library: that one gathers a copy of all tensors before it writes, and
reads through pages of 4 KiB that are mapped one by one.
"""

import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 64 * 2**20


class DamagedFileError(ValueError):
    """The file is not what was written. The message names it and what is wrong."""


def file_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """What a file of them takes at least."""
    return sum(tensor.nbytes for tensor in tensors.values())


def write_weight_file(file: BinaryIO, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> None:
    """notes: kept beside the tensors; those under a tensor's name are covered by its checksum. Raises OSError."""
    header: dict[str, Any] = {}
    checksums: dict[str, int] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        checksums[name] = _checksum(header[name], notes.get(name, ""), _bytes_of(tensor))
    header["__metadata__"] = {"notes": json.dumps(dict(notes)), "crc32": json.dumps(checksums)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(_LENGTH.pack(len(encoded)) + encoded)
    for tensor in tensors.values():
        file.write(_bytes_of(tensor))


class WeightFile:
    """An open file. Every fault of its contents is a DamagedFileError, found before a wrong tensor is given out."""

    def __init__(self, path: Path) -> None:
        """Raises DamagedFileError, or OSError if there is no such file."""
        self.path = path
        self._file = path.open("rb", buffering=0)
        try:
            self._read_header()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.close()
            raise DamagedFileError(f"{path}: its header is damaged: {error!r}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def note(self, name: str) -> str:
        return self._notes.get(name, "")

    def tensor(self, name: str, empty: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """empty: gives uint8 memory of so many bytes. Raises DamagedFileError."""
        entry = self._entries.get(name)
        if entry is None:
            raise DamagedFileError(f"{self.path}: {name} is missing")
        try:
            dtype, shape, (start, end) = _DTYPES[entry["dtype"]], torch.Size(entry["shape"]), entry["data_offsets"]
            fits = 0 <= start <= end <= self._data_bytes and end - start == shape.numel() * dtype.itemsize
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedFileError(f"{self.path}: {name}: its entry is damaged: {error!r}") from None
        if not fits:
            raise DamagedFileError(f"{self.path}: {name}: {entry} is outside of the file, or of another size")
        memory = empty(end - start)
        view = memory.numpy().data
        self._file.seek(self._data_start + start)
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done:])
            if not count:
                raise DamagedFileError(f"{self.path}: it ends within {name}")
            done += count
        if _checksum(entry, self.note(name), view) != self._checksums.get(name):
            raise DamagedFileError(f"{self.path}: {name} has another checksum than when it was written")
        return memory.view(dtype).view(shape)

    def close(self) -> None:
        self._file.close()

    def _read_header(self) -> None:
        (length,) = _LENGTH.unpack(self._file.read(_LENGTH.size).ljust(_LENGTH.size, b"\xff"))
        self._data_start = _LENGTH.size + length
        self._data_bytes = self.num_bytes - self._data_start
        if length > _LONGEST_HEADER or self._data_bytes < 0:
            raise ValueError(f"a header of {length} bytes")
        self._entries: dict[str, Any] = json.loads(self._file.read(length))
        metadata = self._entries.pop("__metadata__")
        self._notes: dict[str, str] = json.loads(metadata["notes"])
        self._checksums: dict[str, int] = json.loads(metadata["crc32"])
        if not (isinstance(self._notes, dict) and isinstance(self._checksums, dict)):
            raise ValueError("notes and checksums are no objects")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    assert tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8).numpy().data


def _checksum(entry: Mapping[str, Any], note: str, data: memoryview) -> int:
    """Of the entry without its place in the file, the note and the data."""
    return zlib.crc32(data, zlib.crc32(f"{entry['dtype']} {entry['shape']} {note}".encode()))
