"""Tuned tiles of experts: vLLM's files, what they mean here, and the messages about missing or malformed ones."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.gemm.fp8.choose import Device
from kernels.moe.align.triton import AlignedPairs, align
from kernels.moe.gemm import tiles as tiles_module
from kernels.moe.gemm import triton as gpu
from kernels.moe.gemm.tiles import FEW, MoeTile, file_name, tuned_tile
from kernels.triton_common.tuned_tiles import FOLDER_VARIABLE, TunedConfigError
from tests.support.gpu.gpu import DEVICE

NAME = "E=8,N=64,device_name=NVIDIA_H200.json"
FP8_NAME = "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
SMALL = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 32,
    "BLOCK_SIZE_K": 256,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 5,
}
LARGE = {**SMALL, "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 32}


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps tests from reading this machine's cache and from sharing tiles with each other."""
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    tiles_module._tiles.cache_clear()


def tile_of(num_tokens: int, folder: Path | None, *, is_fp8: bool = False) -> MoeTile | None:
    if is_fp8:
        return tuned_tile(num_tokens, 256, 256, "NVIDIA H200", is_fp8=True, folder=folder)
    return tuned_tile(num_tokens, 8, 64, "NVIDIA H200", is_fp8=False, folder=folder)


def test_names_are_those_of_vllm() -> None:
    assert file_name(8, 64, "NVIDIA H200", is_fp8=False) == NAME
    assert file_name(256, 256, "NVIDIA H200", is_fp8=True) == FP8_NAME


def test_a_file_of_vllm_means_as_large_tiles_here(tmp_path: Path) -> None:
    """Gate and up share the columns of a vLLM tile; a step's depth is counted in bytes; the nearest batch counts."""
    (tmp_path / NAME).write_text(json.dumps({"triton_version": "3.6.0", "1": SMALL, "64": LARGE}))
    assert tile_of(32, tmp_path) == MoeTile(
        block_m=16, gated_block_n=16, down_block_n=32, depth_bytes=512, num_warps=4, num_stages=5, group_m=1
    )
    assert tile_of(33, tmp_path) == MoeTile(
        block_m=64, gated_block_n=128, down_block_n=256, depth_bytes=256, num_warps=4, num_stages=5, group_m=32
    )


def test_a_tile_of_fp8_has_columns_of_one_scale(tmp_path: Path) -> None:
    (tmp_path / FP8_NAME).write_text(json.dumps({"64": LARGE}))
    assert tile_of(1, tmp_path, is_fp8=True) == MoeTile(
        block_m=64, gated_block_n=128, down_block_n=128, depth_bytes=128, num_warps=4, num_stages=5, group_m=32
    )


def test_the_environment_s_folder_counts_before_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory, stages in ((tmp_path / "cache/moe_gemm", 2), (tmp_path / "mine", 3)):
        directory.mkdir(parents=True)
        (directory / NAME).write_text(json.dumps({"1": {**SMALL, "num_stages": stages}}))
    found = [tile_of(1, None)]
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "mine"))
    assert [tile.num_stages for tile in (*found, tile_of(1, None)) if tile] == [2, 3]


def test_a_missing_file_is_warned_about_once_with_the_tiles_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert [tile_of(num_tokens, tmp_path) for num_tokens in (1, 2, 64)] == [None] * 3
    assert len(caplog.messages) == 1
    assert NAME in caplog.messages[0]
    assert "16 x 128, 64 x 128, 128 x 128" in caplog.messages[0]
    assert FOLDER_VARIABLE in caplog.messages[0]


@pytest.mark.parametrize(
    ("is_fp8", "changes", "said"),
    [
        (False, {"SPLIT_K": 2}, "1: SPLIT_K=2 does not work; it has to be 1 or left out"),
        (False, {"BLOCK_SIZE_K": 512}, "1: BLOCK_SIZE_K=512 does not work; .*from 32 to 256"),
        (True, {"BLOCK_SIZE_K": 256}, "1: BLOCK_SIZE_K=256 does not work; .*from 32 to 128"),
        (False, {"kpack": 2}, "1: kpack=2 is not known"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, is_fp8: bool, changes: dict[str, Any], said: str) -> None:
    path = tmp_path / (FP8_NAME if is_fp8 else NAME)
    path.write_text(json.dumps({"1": {**SMALL, "BLOCK_SIZE_K": 64, **changes}}))
    with pytest.raises(TunedConfigError, match=said) as caught:
        tile_of(1, tmp_path, is_fp8=is_fp8)
    assert str(path) in str(caught.value)


def test_experts_on_a_gpu_take_the_tuned_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile follows the number of tokens, not of pairs. In batch-invariant mode it does not depend on the batch."""
    device = Device(capability=90, num_sms=132, name="NVIDIA H200", cuda_version=(12, 9), has_scaled_mm=True)
    monkeypatch.setattr(gpu, "device_of", lambda _: device)
    used: list[int] = []

    def aligned(experts_TK: torch.Tensor, num_experts: int, block_m: int) -> AlignedPairs:
        used.append(block_m)
        return align(experts_TK, num_experts, block_m)

    monkeypatch.setattr(gpu, "align", aligned)
    file = json.dumps({"4": {**SMALL, "BLOCK_SIZE_M": 32}, "8": {**SMALL, "BLOCK_SIZE_M": 128}})
    (tmp_path / NAME).write_text(file)
    x_TH, gate_up, down = (torch.zeros(n).bfloat16().to(DEVICE) for n in ((4, 16), (8, 128, 16), (8, 16, 64)))
    experts = gpu.Experts(gate_up_E2IH=gate_up, down_EHI=down)
    weights_TK, experts_TK = torch.ones(4, 2, device=DEVICE), torch.zeros(4, 2, dtype=torch.int32, device=DEVICE)
    ways: list[dict[str, Any]] = [{}, {"batch_invariant": True}, {"tile": FEW}]
    for options in ways:
        gpu.run_experts(x_TH, experts, weights_TK, experts_TK, tuned_folder=tmp_path, **options)
    assert used == [32, 64, 16]
