"""Ahead-of-time builds of SiLU-mul: the MLP of Llama-3.1-8B, whole and as a rank's share."""

from collections.abc import Callable

from kernels.elementwise.silu_mul.triton import silu_mul, silu_mul_quantize_groups, silu_mul_quantize_tokens
from kernels.triton_common.kernel_build import ARCHS, FP8_ARCHS, KernelBuild
from kernels.triton_common.recording import bf16, recorded


def shipped() -> list[KernelBuild]:
    gate_up, share = bf16(8, 2 * 14336), bf16(8, 2 * 3584)

    def build(name: str, launch: Callable[[], object], archs: tuple[int, ...] = ARCHS) -> KernelBuild:
        return recorded(name, launch, archs=archs, expects_vectors=True)

    return [
        build("silu", lambda: silu_mul(gate_up)),
        build("clamped-swiglu", lambda: silu_mul(gate_up, activation="clamped_swiglu")),
        build("gelu", lambda: silu_mul(gate_up, activation="gelu_tanh")),
        build("tokens", lambda: silu_mul_quantize_tokens(gate_up), FP8_ARCHS),
        build("tokens-share", lambda: silu_mul_quantize_tokens(share), FP8_ARCHS),
        build("groups", lambda: silu_mul_quantize_groups(gate_up), FP8_ARCHS),
    ]
