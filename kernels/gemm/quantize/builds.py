"""Ahead-of-time builds of quantization: with a hidden size that is a multiple of 16, and one that is not."""

from collections.abc import Callable

from kernels.gemm.quantize.triton import quantize_blocks, quantize_groups, quantize_tokens
from kernels.triton_common.kernel_build import FP8_ARCHS, KernelBuild
from kernels.triton_common.recording import bf16, recorded


def shipped() -> list[KernelBuild]:
    def build(name: str, launch: Callable[[], object]) -> KernelBuild:
        return recorded(name, launch, archs=FP8_ARCHS)

    return [
        build("tokens-whole", lambda: quantize_tokens(bf16(8, 8192))),
        build("tokens-long", lambda: quantize_tokens(bf16(8, 28672))),
        build("groups-few-rows", lambda: quantize_groups(bf16(8, 4096))),
        build("groups", lambda: quantize_groups(bf16(256, 4096))),
        build("groups-ue8m0", lambda: quantize_groups(bf16(256, 4096), power_of_two=True)),
        build("groups-odd-size", lambda: quantize_groups(bf16(256, 4100))),
        build("blocks", lambda: quantize_blocks(bf16(4096, 4096))),
    ]
