"""Tuned configurations: vLLM's files, the nearest batch size, and the messages about missing or malformed files."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kernels.gemm.fp8 import tuned_files
from kernels.gemm.fp8.tuned_files import file_name, tuned_tile
from kernels.triton_common.tuned_tiles import FOLDER_VARIABLE, Tile, TunedConfigError, read_tiles, write_tiles

NAME = "N=12288,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
# The published tiles of that shape.
SMALL = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 32,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 32,
    "num_warps": 4,
    "num_stages": 5,
}
LARGE = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 128,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps tests from reading this machine's cache and from sharing tiles with each other."""
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    tuned_files._tiles.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tuned"
    path.mkdir()
    return path


def tile_of(M: int, folder: Path | None = None) -> Tile | None:
    return tuned_tile(M, 12288, 7168, "NVIDIA H200", blockwise=True, folder=folder)


def test_names_are_those_of_vllm() -> None:
    assert file_name(12288, 7168, "NVIDIA H200", blockwise=True) == NAME
    name = "N=512,K=4096,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8.json"
    assert file_name(512, 4096, "NVIDIA H100 80GB HBM3", blockwise=False) == name


@pytest.mark.parametrize("name", [NAME, NAME.replace("128,128", "128, 128")])
def test_a_file_of_vllm_loads_as_it_is(folder: Path, name: str) -> None:
    (folder / name).write_text(json.dumps({"triton_version": "3.6.0", "16": SMALL, "256": LARGE}, indent=4))
    assert tile_of(16, folder) == Tile(block_m=16, block_n=32, block_k=128, group_m=32, num_warps=4, num_stages=5)
    assert tile_of(256, folder) == Tile(block_m=64, block_n=128, block_k=128, group_m=1, num_warps=4, num_stages=3)


@pytest.mark.parametrize(("M", "nearest"), [(1, 2), (2, 2), (9, 2), (10, 2), (11, 18), (18, 18), (4096, 18)])
def test_the_nearest_batch_counts_and_of_two_the_smaller(folder: Path, M: int, nearest: int) -> None:
    # Out of order; sorted as text, 18 would come before 2.
    (folder / NAME).write_text(json.dumps({"18": {**SMALL, "num_stages": 3}, "2": SMALL}))
    tile = tile_of(M, folder)
    assert tile is not None
    assert tile.num_stages == {2: 5, 18: 3}[nearest]


def test_folders_in_their_order(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The given folder takes precedence over the environment's, which does over the cache, where the tuner writes."""
    other = tmp_path / "other"
    for number, directory in enumerate((tmp_path / "cache/fp8_gemm", other, folder), 1):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / NAME).write_text(json.dumps({"1": {**SMALL, "num_stages": number}}))
    stages = [tile.num_stages for tile in [tile_of(1)] if tile]
    monkeypatch.setenv(FOLDER_VARIABLE, str(other))
    stages += [tile.num_stages for tile in (tile_of(1), tile_of(1, folder)) if tile]
    assert stages == [1, 2, 3]


def test_a_missing_file_is_warned_about_once_with_the_command(caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    with caplog.at_level(logging.WARNING):
        assert [tile_of(M, folder) for M in (1, 2, 64)] == [None] * 3
    assert len(caplog.messages) == 1
    assert NAME in caplog.messages[0]
    assert "octavo bench kernels --tune fp8_gemm --shape 12288,7168" in caplog.messages[0]


def test_what_is_written_is_read(folder: Path) -> None:
    tiles = {64: Tile(block_m=64, block_n=64, block_k=128, split_k=2), 8: Tile(block_m=16, block_n=32, block_k=64)}
    write_tiles(folder / NAME, tiles)
    assert read_tiles(folder / NAME) == tiles
    written = json.loads((folder / NAME).read_text())
    assert list(written) == ["8", "64"]
    # Keys that vLLM does not know are written only where they are needed.
    assert set(written["8"]) == set(SMALL)
    assert set(written["64"]) == {*SMALL, "SPLIT_K"}


def _with(**changes: Any) -> dict[str, Any]:
    return {"16": {**SMALL, **changes}}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("{", "cannot be read as JSON"),
        ([1], "is no object that maps batch sizes"),
        ({}, "no batch sizes"),
        ({"triton_version": "3.6.0"}, "no batch sizes"),
        ({"large": SMALL}, "the key 'large' is no batch size"),
        ({"0": SMALL}, "the key '0' is no batch size"),
        ({"16": 3}, "16: 3 is no object with the keys BLOCK_SIZE_M"),
        (_with(BLOCK_SIZE_M=48), r"16: BLOCK_SIZE_M=48 does not work; it has to be a power of two from 16 to 256"),
        (_with(BLOCK_SIZE_K=256), r"16: BLOCK_SIZE_K=256 does not work; it has to be a power of two from 32 to 128"),
        (_with(num_stages=2.5), r"16: num_stages=2\.5 does not work; it has to be a whole number from 1 to 8"),
        (_with(num_warps=True), "16: num_warps=True does not work"),
        (_with(GROUP_SIZE_M="8"), "16: GROUP_SIZE_M='8' does not work"),
        (_with(kpack=2), "16: kpack=2 is not known; the keys are BLOCK_SIZE_M"),
        ({"16": {key: value for key, value in SMALL.items() if key != "num_warps"}}, "16: num_warps is missing"),
    ],
)
def test_a_malformed_file_is_refused(folder: Path, values: object, said: str) -> None:
    """The error has the file's name, the batch size and key, the value, and what would work."""
    (folder / NAME).write_text(values if isinstance(values, str) else json.dumps(values))
    with pytest.raises(TunedConfigError, match=said) as caught:
        tile_of(16, folder)
    assert str(folder / NAME) in str(caught.value)


def test_a_folder_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(TunedConfigError, match=r"OCTAVO_TUNED_CONFIG_FOLDER=.*absent is no folder"):
        tile_of(1)


def test_every_file_that_ships_loads() -> None:
    for path in tuned_files._SHIPPED.glob("*.json"):
        assert read_tiles(path)
