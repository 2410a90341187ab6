"""The safetensors files of a Hugging Face directory."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from worker.weights.reader import Shape, WeightsError, some

INDEX = "model.safetensors.index.json"
# The length of the header, in front of it.
_LENGTH = struct.Struct("<Q")


def weight_files(directory: Path) -> list[Path]:
    """Returns a directory's safetensors files, sorted by name. Raises WeightsError if there are none or shards are
    missing."""
    index = directory / INDEX
    if not index.is_file():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{directory}: no *.safetensors file; weights come from safetensors or GGUF only")
        return files
    names = sorted(set(_weight_map(index).values()))
    # The index is untrusted: a name in it must not lead out of the directory.
    bad = [name for name in names if Path(name).name != name]
    if bad:
        raise WeightsError(f"{index}: {some([repr(name) for name in bad])} is not a file name")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise WeightsError(
            f"{directory}: {len(missing)} of the {len(names)} shards in {INDEX} are missing: {some(missing)}"
        )
    return [directory / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    """Returns the file of each tensor. Raises WeightsError."""
    try:
        found = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_members)["weight_map"]
        bad = [name for name in found.values() if not isinstance(name, str)]
    except (OSError, ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index}: not an index with a weight_map: {error}") from None
    if bad:
        raise WeightsError(f"{index}: {some([repr(name) for name in bad])} is not a file name")
    return found


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a name that is there twice: readers take the first, or the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r:.100} is there twice")
    return found


def _check_header(file: Path) -> None:
    """Raises WeightsError if a file's header has a name twice, which its library does not look for."""
    with file.open("rb") as opened:
        (length,) = _LENGTH.unpack(opened.read(_LENGTH.size))
        try:
            json.loads(opened.read(length), object_pairs_hook=_members)
        except (ValueError, RecursionError) as error:
            raise WeightsError(f"{file}: damaged: its header: {error}; get the file again") from None


class SafetensorsFiles:
    """The safetensors files of a directory, mapped into memory. Raises WeightsError for a damaged one, for a tensor
    that is in two files, and for one that is not in the file that the index says."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.files = weight_files(directory)
        self.shapes: dict[str, Shape] = {}
        # In safetensors' spelling, such as BF16 and F8_E4M3.
        self.dtypes: dict[str, str] = {}
        self._owner: dict[str, safe_open] = {}
        index = directory / INDEX
        placed = _weight_map(index) if index.is_file() else {}
        found: dict[str, str] = {}
        for file in self.files:
            try:
                opened = safe_open(file, framework="pt")
                _check_header(file)
                for name in opened.keys():  # noqa: SIM118 - a safe_open is no dict
                    home = found.setdefault(name, placed.get(name, file.name))
                    if home != file.name:
                        where = f"{INDEX} says {home}" if name in placed else f"in {home}, too"
                        raise WeightsError(f"{directory}: {name} is in {file.name}, and {where}: keep one of them")
                    stored = opened.get_slice(name)
                    self.shapes[name] = tuple(stored.get_shape())
                    self.dtypes[name] = stored.get_dtype()
                    self._owner[name] = opened
            except (SafetensorError, OSError) as error:
                raise WeightsError(
                    f"{file}: damaged or cut short, at {file.stat().st_size:,} bytes: {error}; get the file again"
                ) from None

    def stored_name(self, name: str) -> str:
        """Returns a tensor's name in the checkpoint, which its config.json uses, too."""
        return name

    def whole_of(self, name: str) -> tuple[str, ...]:
        """Returns the stored weight that the weight `name` may be a part of, then all its parts, in order. Empty: it is
        no part."""
        return ()

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Returns a tensor as it is stored, a view of the file. rows: only these rows."""
        return self._read_rows(name, rows)

    def read_columns(self, name: str, columns: slice) -> torch.Tensor:
        """Returns some columns of a matrix as it is stored."""
        return self._read(
            self.stored_name(name), lambda file, stored: file.get_slice(stored)[:, columns.start : columns.stop]
        )

    def _read_rows(self, stored: str, rows: slice | None) -> torch.Tensor:
        if rows is None:
            return self._read(stored, lambda file, stored: file.get_tensor(stored))
        return self._read(stored, lambda file, stored: file.get_slice(stored)[rows.start : rows.stop])

    def _read(self, stored: str, get: Callable[[safe_open, str], torch.Tensor]) -> torch.Tensor:
        try:
            return get(self._owner[stored], stored)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self.path}: {stored} cannot be read: {error}") from None
