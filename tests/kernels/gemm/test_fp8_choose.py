"""The path and the tile that a GEMM gets, on simulated devices."""

import dataclasses

import pytest
import torch

from kernels.gemm.fp8.choose import SCALED_MM_MIN_ROWS, Device, Problem, choose_path, default_tile, with_parts_of_k
from kernels.triton_common.tuned_tiles import Tile

H200 = Device(capability=90, num_sms=132, name="NVIDIA H200", cuda_version=(13, 0), has_scaled_mm=True)
LARGE = Problem(M=4096, N=4096, K=7168, blockwise=True, out_dtype=torch.bfloat16, has_bias=False)


def test_many_rows_go_to_scaled_mm_and_few_to_triton() -> None:
    for blockwise in (True, False):
        large = dataclasses.replace(LARGE, blockwise=blockwise)
        assert choose_path(large, H200, batch_invariant=False).path == "scaled_mm"
        small = dataclasses.replace(large, M=SCALED_MM_MIN_ROWS - 1)
        choice = choose_path(small, H200, batch_invariant=False)
        assert choice.path == "triton"
        assert f"M={small.M} is below {SCALED_MM_MIN_ROWS}" in choice.reason


@pytest.mark.parametrize(
    ("problem", "device", "reason"),
    [
        (LARGE, dataclasses.replace(H200, capability=0), "no GPU"),
        (LARGE, dataclasses.replace(H200, has_scaled_mm=False), "torch.nn.functional.scaled_mm"),
        (LARGE, dataclasses.replace(H200, cuda_version=(12, 8)), "sm_90 and CUDA 12.9, here are sm_90 and CUDA 12.8"),
        (LARGE, dataclasses.replace(H200, capability=89), "here are sm_89"),
        (LARGE, dataclasses.replace(H200, capability=100), "here are sm_100"),
        (dataclasses.replace(LARGE, M=4097), H200, "M=4097 has to be a multiple of 4"),
        (dataclasses.replace(LARGE, N=4104), H200, "N=4104 and K=7168 have to be multiples of 16"),
        (dataclasses.replace(LARGE, N=4112), H200, "multiples of 128"),
        (dataclasses.replace(LARGE, scales_are_m_major=False), H200, "M-major"),
        (dataclasses.replace(LARGE, has_bias=True, out_dtype=torch.float32), H200, "bias"),
    ],
)
def test_what_scaled_mm_does_not_take_goes_to_triton(problem: Problem, device: Device, reason: str) -> None:
    choice = choose_path(problem, device, batch_invariant=False)
    assert choice.path == "triton"
    assert choice.reason.startswith("scaled_mm does not take it: ")
    assert reason in choice.reason


def test_scales_of_rows_need_less() -> None:
    """With one scale per row, M may be any number, on Ada and with CUDA below 12.9."""
    problem = dataclasses.replace(LARGE, blockwise=False, M=4097, N=4112)
    old = dataclasses.replace(H200, capability=89, cuda_version=(12, 6))
    assert choose_path(problem, old, batch_invariant=False).path == "scaled_mm"


def test_batch_invariant_never_takes_scaled_mm() -> None:
    assert choose_path(LARGE, H200, batch_invariant=True).path == "triton"


def test_default_tiles_grow_with_the_batch() -> None:
    tiles = [default_tile(M, 16384, 7168, 132) for M in (1, 16, 17, 32, 33, 128, 129, 8192)]
    assert [tile.block_m for tile in tiles] == [16, 16, 64, 64, 64, 64, 64, 64]
    assert [tile.block_n for tile in tiles] == [64, 64, 128, 128, 128, 128, 128, 128]


def test_k_is_split_while_programs_are_few_and_parts_long() -> None:
    tile = Tile(block_m=16, block_n=32, block_k=128)
    split = {
        (N, K): with_parts_of_k(tile, 1, N, K, 132).split_k
        for N, K in ((1024, 8192), (4096, 4096), (8192, 8192), (1024, 2047), (1024, 1 << 20))
    }
    # At most 528 programs. 32 programs: 8 parts make 256. 128 programs: 4 parts. 256: 2 parts. Parts below 1024 do not
    # pay.
    assert split == {(1024, 8192): 8, (4096, 4096): 4, (8192, 8192): 2, (1024, 2047): 1, (1024, 1 << 20): 8}
    # At most 264 with more rows.
    assert with_parts_of_k(dataclasses.replace(tile, block_m=64), 64, 4096, 4096, 132).split_k == 2
