"""How RMS norm ships: sizes of SmolLM2, gpt-oss, Llama and DeepSeek, and the longest, alone and with all that is
fused."""

from typing import Any

import triton.language as tl

from kernels.elementwise.rms_norm import triton as gpu
from kernels.triton_common.kernel_build import ARCHS, FP8_ARCHS, KernelBuild


def shipped() -> list[KernelBuild]:
    return [
        _build("plain-576", 576),
        _build("plain-stream-4096", 4096, x="fp32"),
        _build("residual-4096", 4096, residual="bf16"),
        _build("residual-stream-4096", 4096, residual="fp32"),
        _build("plain-32768", 32768, residual="bf16"),
        _build("tokens-2880", 2880, residual="bf16", quantization=gpu._BY_TOKEN),
        _build("tokens-stream-4096", 4096, residual="fp32", quantization=gpu._BY_TOKEN),
        _build("groups-7168", 7168, residual="bf16", quantization=gpu._BY_GROUP),
        _build("groups-stream-7168", 7168, residual="fp32", quantization=gpu._BY_GROUP),
    ]


def _build(
    name: str, size: int, *, x: str = "bf16", residual: str = "", quantization: Any = gpu._NOT_QUANTIZED
) -> KernelBuild:
    """The norm is rounded to bf16."""
    groups, num_warps = gpu.tile_of(size)
    quantized = quantization != gpu._NOT_QUANTIZED
    strides = ("x_stride", "residual_stride", "out_stride")
    return KernelBuild(
        name=name,
        fn=gpu._rms_norm_kernel,
        signature={
            "x_TN": f"*{x}",
            "weight_N": "*bf16",
            "out_TN": "*fp8e4nv" if quantized else "*bf16",
            "eps": "fp32",
            "num_tokens": "i32",
            **({"residual_TN": f"*{residual}"} if residual else {}),
            **({"scales": "*fp32"} if quantized else {}),
            **dict.fromkeys(strides, "i32"),
        },
        constexprs={
            **({} if residual else {"residual_TN": None}),
            **({} if quantized else {"scales": None}),
            "SIZE": size,
            "NORM_DTYPE": tl.bfloat16,
            "QUANTIZATION": quantization.value,
            "POWER_OF_TWO": False,
            "GROUPS": groups,
        },
        num_warps=num_warps,
        num_stages=3,
        expects_vectors=True,
        multiples_of_16=strides,
        archs=FP8_ARCHS if quantized else ARCHS,
    )
