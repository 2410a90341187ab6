"""Tuned configurations: files in the naming and format of vLLM, so that those made for it are used as they are.

`N=12288,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json` maps batch sizes M to tiles:
`{"16": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, ...}, ...}`. Without block_shape it is for scales per tensor, token and
channel. A batch takes the tile of the nearest M. `octavo bench kernels --tune fp8_gemm` makes such files.

Folders, the first that has the file: the one given, $OCTAVO_TUNED_CONFIG_FOLDER, fp8_gemm/ in the cache directory
(where the tuner writes), tuned/ beside this file.
"""

import json
import logging
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from kernels.cache_directory import cache_directory
from kernels.fp8_gemm.tile import Tile, TileError, tile_from_json

FOLDER_VARIABLE = "OCTAVO_TUNED_CONFIG_FOLDER"
_SHIPPED = Path(__file__).parent / "tuned"
# A note of which Triton a file was made with, beside the batch sizes.
_NOTES = {"triton_version"}

logger = logging.getLogger(__name__)


class TunedConfigError(ValueError):
    """A tuned configuration that cannot be used; the message names file, key, value and what would work."""


def file_name(N: int, K: int, device_name: str, *, blockwise: bool) -> str:
    """device_name: as CUDA has it, "NVIDIA H200"."""
    block = ",block_shape=[128,128]" if blockwise else ""
    return f"N={N},K={K},device_name={device_name.replace(' ', '_')},dtype=fp8_w8a8{block}.json"


def tune_command(N: int, K: int, *, blockwise: bool) -> str:
    scales = "" if blockwise else " --scales channel"
    return f"octavo bench kernels --tune fp8_gemm --shape {N},{K}{scales}"


def tuned_tile(
    M: int, N: int, K: int, device_name: str, *, blockwise: bool, folder: str | Path | None = None
) -> Tile | None:
    """The tile for a batch of M, or None where nothing is tuned, which is warned about once for each file.

    Raises TunedConfigError for a malformed file.
    """
    environment = os.environ.get(FOLDER_VARIABLE)
    return _nearest(M, _tiles(N, K, device_name, blockwise, str(folder or environment or "")))


def write_tiles(path: Path, tiles: Mapping[int, Tile]) -> None:
    """All at once: a reader finds the old file or the new one. tiles: by batch size."""
    text = json.dumps({str(M): tiles[M].as_json() for M in sorted(tiles)}, indent=4)
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text + "\n")
    partial.replace(path)


def read_tiles(path: Path) -> dict[int, Tile]:
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
            tiles[int(key)] = tile_from_json(value)
        except TileError as error:
            raise TunedConfigError(f"{path}: {key}: {error}") from None
    if not tiles:
        raise TunedConfigError(f'{path} has no batch sizes; at least one is needed, such as "16"')
    return dict(sorted(tiles.items()))


@lru_cache(maxsize=1024)
def _tiles(N: int, K: int, device_name: str, blockwise: bool, folder: str) -> dict[int, Tile] | None:
    name = file_name(N, K, device_name, blockwise=blockwise)
    # Some of vLLM's files have a space in the block shape.
    names = (name, name.replace("[128,128]", "[128, 128]"))
    if folder and not Path(folder).is_dir():
        raise TunedConfigError(f"{FOLDER_VARIABLE}={folder} is no folder; it has to be one with files such as {name}")
    folders = [Path(folder)] if folder else []
    for directory in (*folders, cache_directory("fp8_gemm"), _SHIPPED):
        for path in (directory / spelling for spelling in names):
            if path.is_file():
                return read_tiles(path)
    logger.warning(
        "no tuned configuration %s: default tiles are used, which may be slower; `%s` makes it",
        name,
        tune_command(N, K, blockwise=blockwise),
    )
    return None


def _nearest(M: int, tiles: Mapping[int, Tile] | None) -> Tile | None:
    if tiles is None:
        return None
    return tiles[min(tiles, key=lambda batch: (abs(batch - M), batch))]
