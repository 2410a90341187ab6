"""Ahead-of-time builds of RMS norm: sizes of SmolLM2, gpt-oss, Llama and DeepSeek, and the longest row; alone and with
everything that is fused."""

from collections.abc import Callable

import torch

from kernels.elementwise.rms_norm.triton import rms_norm, rms_norm_quantize_groups, rms_norm_quantize_tokens
from kernels.triton_common.kernel_build import ARCHS, FP8_ARCHS, KernelBuild
from kernels.triton_common.recording import bf16, float32, recorded, tensor

_BF16, _FP32 = torch.bfloat16, torch.float32


def shipped() -> list[KernelBuild]:
    stream = float32(8, 4096)
    return [
        _build("plain-576", rms_norm, 576),
        recorded(
            "plain-stream-4096",
            lambda: rms_norm(stream, bf16(4096), 1e-5, out_dtype=torch.bfloat16),
            expects_vectors=True,
        ),
        _build("residual-4096", rms_norm, 4096, residual=_BF16),
        _build("residual-stream-4096", rms_norm, 4096, residual=_FP32),
        _build("plain-32768", rms_norm, 32768, residual=_BF16),
        _build("tokens-2880", rms_norm_quantize_tokens, 2880, residual=_BF16),
        _build("tokens-stream-4096", rms_norm_quantize_tokens, 4096, residual=_FP32),
        _build("groups-7168", rms_norm_quantize_groups, 7168, residual=_BF16),
        _build("groups-stream-7168", rms_norm_quantize_groups, 7168, residual=_FP32),
    ]


def _build(name: str, op: Callable[..., object], size: int, *, residual: torch.dtype | None = None) -> KernelBuild:
    residual_TN = None if residual is None else tensor(residual, 8, size)
    return recorded(
        name,
        lambda: op(bf16(8, size), bf16(size), 1e-5, residual_TN=residual_TN),
        archs=ARCHS if op is rms_norm else FP8_ARCHS,
        expects_vectors=True,
    )
