"""Files of tuned tiles in vLLM's format: `{"16": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, ...}, ...}`, by batch size.

Folders, the first that has a file: the one given, $OCTAVO_TUNED_CONFIG_FOLDER, the op's in the cache directory, what
ships with the op.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernels.cache_directory import cache_directory
from kernels.tiles.tuned_tile import MAX_FP8_BLOCK_K, Tile, TileError, tile_from_json

FOLDER_VARIABLE = "OCTAVO_TUNED_CONFIG_FOLDER"
# A note of which Triton a file was made with, beside the batch sizes.
_NOTES = {"triton_version"}


class TunedConfigError(ValueError):
    """A tuned configuration that cannot be used; the message names file, key, value and what would work."""


def first_folder(given: str | Path | None) -> str:
    """The one given, or the environment's; "": neither."""
    return str(given or os.environ.get(FOLDER_VARIABLE) or "")


def find_file(name: str, *, op: str, folder: str, shipped: Path | None = None) -> Path | None:
    """folder: of `first_folder`. Raises TunedConfigError if there is none of that name."""
    # Some of vLLM's files have a space in the block shape.
    names = (name, name.replace("[128,128]", "[128, 128]"))
    if folder and not Path(folder).is_dir():
        raise TunedConfigError(f"{FOLDER_VARIABLE}={folder} is no folder; it has to be one with files such as {name}")
    folders = [Path(folder)] if folder else []
    folders += [cache_directory(op)] if shipped is None else [cache_directory(op), shipped]
    paths = (directory / spelling for directory in folders for spelling in names)
    return next((path for path in paths if path.is_file()), None)


def write_tiles(path: Path, tiles: Mapping[int, Tile]) -> None:
    """All at once: a reader finds the old file or the new one. tiles: by batch size."""
    text = json.dumps({str(M): tiles[M].as_json() for M in sorted(tiles)}, indent=4)
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text + "\n")
    partial.replace(path)


def read_tiles(path: Path, *, max_block_k: int = MAX_FP8_BLOCK_K) -> dict[int, Tile]:
    """By batch size, in ascending order. Raises TunedConfigError."""
    try:
        values: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TunedConfigError(f"{path} cannot be read as JSON: {error}; remove it, or make it anew") from None
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
    """That of the nearest batch size; of two the smaller one's."""
    return tiles[min(tiles, key=lambda batch: (abs(batch - M), batch))]
