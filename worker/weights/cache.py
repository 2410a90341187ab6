"""Keeps packed weights in a cache directory, so that the next start need not pack them."""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

import torch

from kernels.linear.weights import PackedWeight, Weight
from kernels.native.cache_directory import CacheDirectoryError, cache_directory
from worker.weights.source import SourceReader

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 64 * 2**20


class DamagedFileError(ValueError):
    """A file does not hold what was written. The message names the file and the problem."""


def file_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Returns the minimum size of a file with these tensors, in bytes."""
    return sum(tensor.nbytes for tensor in tensors.values())


def write_weight_file(file: BinaryIO, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> None:
    """Writes tensors and notes. A note under a tensor's name is covered by the tensor's checksum. Raises OSError."""
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
    """An open file of packed weights. Any damage raises DamagedFileError before a wrong tensor is returned."""

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
        """Returns a tensor. empty: allocates uint8 memory of a given number of bytes. Raises DamagedFileError."""
        entry = self._entries.get(name)
        if entry is None:
            raise DamagedFileError(f"{self.path}: {name} is missing")
        try:
            dtype, shape, (start, end) = _DTYPES[entry["dtype"]], torch.Size(entry["shape"]), entry["data_offsets"]
            fits = 0 <= start <= end <= self._data_bytes and end - start == shape.numel() * dtype.itemsize
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedFileError(f"{self.path}: {name}: its entry is damaged: {error!r}") from None
        if not fits:
            raise DamagedFileError(f"{self.path}: {name}: {entry} is outside the file or of the wrong size")
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
            raise ValueError("notes or checksums are not objects")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    assert tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8).numpy().data


def _checksum(entry: Mapping[str, Any], note: str, data: memoryview) -> int:
    """Returns the checksum of an entry (without its offsets), its note and its data."""
    return zlib.crc32(data, zlib.crc32(f"{entry['dtype']} {entry['shape']} {note}".encode()))


_log = logging.getLogger("octavo.worker")

_PACKAGES = Path(__file__).resolve().parents[2]
# Smaller models are packed so quickly that a file saves nothing.
_SMALLEST = 16 * 2**20
_SUFFIX = ".safetensors"
# Files of the same model from other versions of the sources are deleted after this time without use, even if there is
# room.
_OUTDATED_S = 24 * 3600.0
_UNFINISHED = ".writing-"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModel:
    """The identity of a model's packed weights. digest: of the weight files. path: the name of the compute path."""

    digest: str
    quantization: str
    path: str

    @property
    def stem(self) -> str:
        """The part of a file's name that does not depend on the sources."""
        return f"{self.digest[:24]}-{self.quantization}-{self.path}"


class WeightCache:
    """The packed weights in the files of one directory."""

    def __init__(self, directory: Path, max_bytes: int, *, smallest: int | None = None) -> None:
        """max_bytes: limit of all files together; the least recently used are deleted first. smallest: smaller models
        are not kept, in bytes."""
        self.directory, self._max_bytes = directory, max_bytes
        self._smallest = _SMALLEST if smallest is None else smallest

    def find(self, model: PackedModel) -> WeightFile | None:
        """Opens the file of a model; returns None if there is no usable one."""
        path = self._file(model)
        try:
            found = WeightFile(path)
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, DamagedFileError) as error:
            self.discard(path, error)
            return None
        return found

    def discard(self, path: Path, error: Exception) -> None:
        """Deletes a damaged file; the weights are then packed again."""
        _log.warning("weights are packed again: %s", error)
        try:
            path.unlink(missing_ok=True)
        except OSError as cause:
            _log.warning("the damaged file cannot be deleted: %s", cause)

    def keep(self, model: PackedModel, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> None:
        """Writes a model's file, unless another process is writing."""
        path, num_bytes = self._file(model), file_bytes(tensors)
        if num_bytes < self._smallest:
            return
        if num_bytes > self._max_bytes:
            _log.info(
                "packed weights are not kept for the next start: they take %.2f GiB, weight_cache allows %.2f",
                num_bytes / 2**30,
                self._max_bytes / 2**30,
            )
            return
        try:
            with self._locked() as is_ours:
                if is_ours and not path.exists():
                    self._make_room(model, num_bytes)
                    self._write(path, tensors, notes)
        except OSError as error:
            _log.warning(
                "packed weights cannot be kept for the next start: %s; free some space, set OCTAVO_CACHE_DIR to a "
                "directory with %.1f GiB, or set weight_cache=0",
                error,
                2 * num_bytes / 2**30,
            )

    def _file(self, model: PackedModel) -> Path:
        return self.directory / f"{model.stem}-{_sources_digest()}{_SUFFIX}"

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Yields True if this process may write. It does not wait for another process: ranks and replicas of one model
        start together, and one writer is enough."""
        with (self.directory / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _make_room(self, model: PackedModel, num_bytes: int) -> None:
        # No other process is writing, so unfinished files were left by processes that were killed.
        for path in self.directory.glob(f"{_UNFINISHED}*"):
            path.unlink()
        for path in self.directory.glob(f"{model.stem}-*{_SUFFIX}"):
            # Another installation may still use the file.
            if time.time() - path.stat().st_mtime > _OUTDATED_S:
                path.unlink()
        kept = sorted(self.directory.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        sizes = [path.stat().st_size for path in kept]
        excess = sum(sizes) + num_bytes - self._max_bytes
        for path, size in zip(kept, sizes, strict=True):
            if excess <= 0:
                break
            path.unlink()
            excess -= size
        free = shutil.disk_usage(self.directory).free
        if free < 2 * num_bytes:
            raise OSError(f"{self.directory} has {free / 2**30:.1f} GiB left")

    def _write(self, path: Path, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> None:
        handle, unfinished = tempfile.mkstemp(dir=self.directory, prefix=_UNFINISHED)
        try:
            with os.fdopen(handle, "wb") as file:
                write_weight_file(file, tensors, notes)
            os.replace(unfinished, path)
        finally:
            Path(unfinished).unlink(missing_ok=True)


def open_weight_cache(gib: float) -> WeightCache | None:
    """Opens the cache. gib: the option weight_cache. Returns None if it is 0, or, with a warning, if there is no usable
    directory."""
    if not gib:
        return None
    try:
        return WeightCache(cache_directory("weights"), int(gib * 2**30))
    except CacheDirectoryError as error:
        _log.warning("packed weights cannot be kept for the next start: %s", error)
        return None


@cache
def _sources_digest() -> str:
    """Returns a digest of all that determines the bytes of packed weights: our sources, and torch, which quantizes."""
    digest = hashlib.sha256(torch.__version__.encode())
    for package in ("kernels", "worker"):
        for path in sorted((_PACKAGES / package).rglob("*")):
            if path.suffix in (".py", ".h", ".cpp"):
                digest.update(f"{path.relative_to(_PACKAGES)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


# Tensors up to this size, in bytes, are kept in the file even if the model has not kept them itself.
_SMALL = 2**20


class CachedWeightReader:
    """A WeightReader. With a file, it takes from there what the file holds, and the rest from the checkpoint. Without
    one, it takes all from the checkpoint, and collects in `tensors` and `notes` what a file should hold."""

    def __init__(self, reader: SourceReader, file: WeightFile | None, empty: Callable[[int], torch.Tensor]) -> None:
        """empty: allocates uint8 memory for weights, of a given number of bytes."""
        self._reader, self._file, self._empty = reader, file, empty
        self._packed: dict[str, torch.Tensor] = {}
        self._small: dict[str, torch.Tensor] = {}
        self._held = WeakValueDictionary[str, torch.Tensor]()
        self.notes: dict[str, str] = {}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Packed weights, tensors that the model holds unchanged, and all small tensors. For others, such as embeddings
        that a rank has only a part of, the whole tensor would stay in memory just to be written."""
        return {**self._held, **self._small, **self._packed}

    def __call__(self, name: str) -> torch.Tensor:
        if self._file is not None and name in self._file:
            self._reader.count(name)
            return self._file.tensor(name, self._empty)
        tensor = self._reader(name).contiguous()
        self._held[name] = tensor
        if tensor.nbytes <= _SMALL:
            self._small[name] = tensor
        return tensor

    def float32(self, name: str) -> torch.Tensor:
        return self._reader.float32(name)

    def weight(self, name: str, outputs: slice | None = None, inputs: slice | None = None) -> Weight:
        return self._reader.weight(name, outputs, inputs)

    def head_weight(self, name: str, outputs: slice | None = None) -> Weight:
        return self._reader.head_weight(name, outputs)

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        return self._reader.kv_scale(attention)

    def packed(self, names: Sequence[str]) -> PackedWeight | None:
        key = _key(names)
        if self._file is None or key not in self._file:
            return None
        for name in names:
            self._reader.count(name)
        # `tensor` verifies a checksum that covers the note, too.
        panels = self._file.tensor(key, self._empty)
        return PackedWeight(**json.loads(self._file.note(key)), panels=panels)

    def keep(self, names: Sequence[str], packed: PackedWeight) -> None:
        key = _key(names)
        self._packed[key] = packed.panels
        self.notes[key] = json.dumps(
            {"kind": packed.kind, "num_rows": packed.num_rows, "num_inputs": packed.num_inputs}
        )


def _key(names: Sequence[str]) -> str:
    """Returns a key that is no tensor's name: tied embeddings are kept both unchanged and packed."""
    return "packed:" + "+".join(names)
