"""GEMM tiles and the JSON files of tuned ones, in vLLM's format."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.native.cache_directory import cache_directory


class TileError(ValueError):
    """An unsupported tile; the message names the key, the value and what would work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows, columns and depth of a program's tile in shared memory, and its launch parameters."""

    block_m: int
    block_n: int
    block_k: int
    # Tiles computed down the rows before the next column of tiles, which keeps columns in L2.
    group_m: int = 1
    num_warps: int = 4
    num_stages: int = 3
    # Parts of K computed by separate programs, then added in order: for a GEMM of few tiles.
    split_k: int = 1

    def as_json(self) -> dict[str, int]:
        values = {key: getattr(self, name) for key, name in _NAMES.items()}
        if self.split_k == 1:
            # vLLM's files have no such key.
            del values["SPLIT_K"]
        return values


_NAMES = {
    "BLOCK_SIZE_M": "block_m",
    "BLOCK_SIZE_N": "block_n",
    "BLOCK_SIZE_K": "block_k",
    "GROUP_SIZE_M": "group_m",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
    "SPLIT_K": "split_k",
}
_OPTIONAL = {"SPLIT_K"}
_POWERS_OF_TWO = {
    "BLOCK_SIZE_M": (16, 256),
    "BLOCK_SIZE_N": (16, 256),
    "BLOCK_SIZE_K": (32, 256),
    "num_warps": (1, 16),
    "SPLIT_K": (1, 64),
}
_COUNTS = {"GROUP_SIZE_M": (1, 1024), "num_stages": (1, 8)}


# Inputs of a block-quantized GEMM that share a scale: a tile's K never spans two groups.
MAX_FP8_BLOCK_K = 128


def tile_from_json(values: Any, *, max_block_k: int = MAX_FP8_BLOCK_K) -> Tile:
    """Returns the tile of an object of a configuration file. Raises TileError."""
    if not isinstance(values, Mapping):
        raise TileError(f"{values!r} is no object with the keys {', '.join(_NAMES)}")
    unknown = [key for key in values if key not in _NAMES]
    if unknown:
        raise TileError(f"{unknown[0]}={values[unknown[0]]!r} is not known; the keys are {', '.join(_NAMES)}")
    missing = [key for key in _NAMES if key not in values and key not in _OPTIONAL]
    if missing:
        needed = ", ".join(key for key in _NAMES if key not in _OPTIONAL)
        raise TileError(f"{missing[0]} is missing; needed are {needed}")
    return Tile(**{_NAMES[key]: _checked(key, value, max_block_k) for key, value in values.items()})


def _checked(key: str, value: Any, max_block_k: int) -> int:
    low, high = (_POWERS_OF_TWO | _COUNTS)[key]
    if key == "BLOCK_SIZE_K":
        high = max_block_k
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if is_whole and low <= value <= high and (key in _COUNTS or value.bit_count() == 1):
        return value
    what = "a whole number" if key in _COUNTS else "a power of two"
    raise TileError(f"{key}={value!r} does not work; it has to be {what} from {low} to {high}")


FOLDER_VARIABLE = "OCTAVO_TUNED_CONFIG_FOLDER"
# A key beside the batch sizes: the Triton version that a file was made with.
_NOTES = {"triton_version"}


class TunedConfigError(ValueError):
    """A tuned configuration that cannot be used; the message names file, key, value and what would work."""


def first_folder(given: str | Path | None) -> str:
    """The folder given, or the environment's; "" if there is neither."""
    return str(given or os.environ.get(FOLDER_VARIABLE) or "")


def find_file(name: str, *, op: str, folder: str, shipped: Path | None = None) -> Path | None:
    """The file, or None. folder: from `first_folder`. Raises TunedConfigError if the folder does not exist."""
    # Some of vLLM's files have a space in the block shape.
    names = (name, name.replace("[128,128]", "[128, 128]"))
    if folder and not Path(folder).is_dir():
        raise TunedConfigError(f"{FOLDER_VARIABLE}={folder} is no folder; it has to be one with files such as {name}")
    folders = [Path(folder)] if folder else []
    folders += [cache_directory(op)] if shipped is None else [cache_directory(op), shipped]
    paths = (directory / spelling for directory in folders for spelling in names)
    return next((path for path in paths if path.is_file()), None)


def write_tiles(path: Path, tiles: Mapping[int, Tile]) -> None:
    """Writes a file atomically: a reader finds the old file or the new one. tiles: by batch size."""
    text = json.dumps({str(M): tiles[M].as_json() for M in sorted(tiles)}, indent=4)
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text + "\n")
    partial.replace(path)


def read_tiles(path: Path, *, max_block_k: int = MAX_FP8_BLOCK_K) -> dict[int, Tile]:
    """Returns tiles by batch size, ascending. Raises TunedConfigError."""
    try:
        values: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TunedConfigError(f"{path} cannot be read as JSON: {error}; remove it, or make it again") from None
    if not isinstance(values, dict):
        raise TunedConfigError(f"{path}: {values!r} is no object that maps batch sizes to tiles")
    tiles = {}
    for key, value in values.items():
        if key in _NOTES:
            continue
        if not (key.isascii() and key.isdigit()) or int(key) < 1:
            raise TunedConfigError(f'{path}: the key {key!r} is no batch size; whole numbers from 1 are, as "16"')
        try:
            tiles[int(key)] = tile_from_json(value, max_block_k=max_block_k)
        except TileError as error:
            raise TunedConfigError(f"{path}: {key}: {error}") from None
    if not tiles:
        raise TunedConfigError(f'{path} has no batch sizes; at least one is needed, such as "16"')
    return dict(sorted(tiles.items()))


def nearest(M: int, tiles: Mapping[int, Tile]) -> Tile:
    """The tile of the nearest batch size, the smaller one if two are equally near."""
    return tiles[min(tiles, key=lambda batch: (abs(batch - M), batch))]
