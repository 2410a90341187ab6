"""Ahead-of-time builds of the grouped GEMM: every tile, gated and not, in bf16 and e4m3."""

import torch

from kernels.moe.gemm.tiles import FEW, MANY, SOME, MoeTile
from kernels.moe.gemm.triton import Experts, _combine_kernel, _grouped_gemm_kernel, run_experts
from kernels.triton_common.kernel_build import ARCHS, FP8_ARCHS, KernelBuild
from kernels.triton_common.recording import bf16, float32, int32, recorded, tensor

_HIDDEN_SIZE, _SIZE, _NUM_EXPERTS, _TOP_K = 2048, 768, 128, 8


def shipped() -> list[KernelBuild]:
    gemms = [
        recorded(
            f"{'gate-up' if gated else 'down'}-{'fp8' if is_fp8 else 'bf16'}-{name}",
            lambda tile=tile, is_fp8=is_fp8: _run(tile, is_fp8=is_fp8),
            kernel=_grouped_gemm_kernel,
            nth=0 if gated else 1,
            archs=FP8_ARCHS if is_fp8 else ARCHS,
            expects_wgmma=tile.block_m >= 64,
        )
        for name, tile in (("few", FEW), ("some", SOME), ("many", MANY))
        for gated in (True, False)
        for is_fp8 in (False, True)
    ]
    biased = [
        recorded(
            f"{'gate-up' if gated else 'down'}-biased",
            lambda: _run(MANY, is_fp8=False, has_biases=True),
            kernel=_grouped_gemm_kernel,
            nth=0 if gated else 1,
            expects_wgmma=MANY.block_m >= 64,
        )
        for gated in (True, False)
    ]
    return [*gemms, *biased, recorded("combine", lambda: _run(FEW, is_fp8=False), kernel=_combine_kernel)]


def _run(tile: MoeTile, *, is_fp8: bool, has_biases: bool = False) -> None:
    dtype = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
    experts = Experts(
        gate_up_E2IH=tensor(dtype, _NUM_EXPERTS, 2 * _SIZE, _HIDDEN_SIZE),
        down_EHI=tensor(dtype, _NUM_EXPERTS, _HIDDEN_SIZE, _SIZE),
        gate_up_scales=float32(_NUM_EXPERTS, 2 * _SIZE // 128, _HIDDEN_SIZE // 128) if is_fp8 else None,
        down_scales=float32(_NUM_EXPERTS, _HIDDEN_SIZE // 128, _SIZE // 128) if is_fp8 else None,
        gate_up_bias_E2I=bf16(_NUM_EXPERTS, 2 * _SIZE) if has_biases else None,
        down_bias_EH=bf16(_NUM_EXPERTS, _HIDDEN_SIZE) if has_biases else None,
        activation="clamped_swiglu" if has_biases else "silu",
    )
    run_experts(bf16(8, _HIDDEN_SIZE), experts, float32(8, _TOP_K), int32(8, _TOP_K), tile=tile)
