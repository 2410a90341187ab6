"""Ahead-of-time builds of routing: as in Mixtral and Qwen3, and as in DeepSeek-V3."""

from kernels.moe.routing.triton import route
from kernels.triton_common.kernel_build import KernelBuild
from kernels.triton_common.recording import bf16, float32, int32, recorded


def shipped() -> list[KernelBuild]:
    return [
        recorded("softmax-128", lambda: route(bf16(8, 128), top_k=8, num_tokens_1=int32(1))),
        recorded(
            "sigmoid-256",
            lambda: route(
                bf16(8, 256),
                top_k=8,
                scoring="sigmoid",
                bias_E=float32(256),
                num_groups=8,
                top_k_groups=4,
                scaling_factor=2.5,
                local_experts_E=int32(256),
                num_tokens_1=int32(1),
            ),
        ),
    ]
