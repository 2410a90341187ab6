"""The safetensors files of a Hugging Face directory."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from worker.weights.reader import Shape, WeightsError, some

INDEX = "model.safetensors.index.json"


def weight_files(directory: Path) -> list[Path]:
    """Returns a directory's safetensors files, sorted by name. Raises WeightsError if there are none or shards are
    missing."""
    index = directory / INDEX
    if not index.is_file():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{directory}: no *.safetensors file; weights come from safetensors or GGUF only")
        return files
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index}: not an index with a weight_map: {error}") from None
    # The index is untrusted: a name in it must not lead out of the directory.
    bad = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if bad:
        raise WeightsError(f"{index}: {some([repr(name) for name in bad])} is not a file name")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise WeightsError(
            f"{directory}: {len(missing)} of the {len(names)} shards in {INDEX} are missing: {some(missing)}"
        )
    return [directory / name for name in names]


class SafetensorsFiles:
    """The safetensors files of a directory, mapped into memory. Raises WeightsError for a damaged one."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.files = weight_files(directory)
        self.shapes: dict[str, Shape] = {}
        # In safetensors' spelling, such as BF16 and F8_E4M3.
        self.dtypes: dict[str, str] = {}
        self._owner: dict[str, safe_open] = {}
        for file in self.files:
            try:
                opened = safe_open(file, framework="pt")
                for name in opened.keys():  # noqa: SIM118 - a safe_open is no dict
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
