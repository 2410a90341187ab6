"""Tuned configurations: files with vLLM's names and format, so that files made for vLLM work unchanged.

`N=12288,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json` maps batch sizes M to tiles:
`{"16": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, ...}, ...}`. A name without block_shape is for scales per tensor, token
and channel. A batch gets the tile of the nearest M. `octavo bench kernels --tune fp8_gemm` makes such files.

The first folder that has the file is used: the one given, $OCTAVO_TUNED_CONFIG_FOLDER, fp8_gemm/ in the cache directory
(where the tuner writes), tuned/ beside this file.
"""

import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from kernels.triton_common.tuned_tiles import Tile, find_file, first_folder, nearest, read_tiles

_SHIPPED = Path(__file__).parent / "tuned"

logger = logging.getLogger("octavo.kernels")


def file_name(N: int, K: int, device_name: str, *, blockwise: bool) -> str:
    """The file name of a weight's shape. device_name: CUDA's, such as "NVIDIA H200"."""
    block = ",block_shape=[128,128]" if blockwise else ""
    return f"N={N},K={K},device_name={device_name.replace(' ', '_')},dtype=fp8_w8a8{block}.json"


def tune_command(N: int, K: int, *, blockwise: bool) -> str:
    scales = "" if blockwise else " --scales channel"
    return f"octavo bench kernels --tune fp8_gemm --shape {N},{K}{scales}"


def tuned_tile(
    M: int, N: int, K: int, device_name: str, *, blockwise: bool, folder: str | Path | None = None
) -> Tile | None:
    """Returns the tile for a batch of M, or None where nothing is tuned; warns once for each missing file.

    Raises TunedConfigError for a malformed file.
    """
    tiles = _tiles(N, K, device_name, blockwise, first_folder(folder))
    return None if tiles is None else nearest(M, tiles)


@lru_cache(maxsize=1024)
def _tiles(N: int, K: int, device_name: str, blockwise: bool, folder: str) -> Mapping[int, Tile] | None:
    name = file_name(N, K, device_name, blockwise=blockwise)
    path = find_file(name, op="fp8_gemm", folder=folder, shipped=_SHIPPED)
    if path is not None:
        return read_tiles(path)
    logger.warning(
        "no tuned configuration %s: default tiles are used, which may be slower; `%s` makes it",
        name,
        tune_command(N, K, blockwise=blockwise),
    )
    return None
